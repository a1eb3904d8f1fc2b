"""Host-resident weights stay off the device under --load-format instanttensor."""

import os
import unittest
from unittest import mock

import pytest
from small_loads import SmallLoads, tensors_of

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

PATTERNS = (".table.",)


class TestHostResidentSplit(SmallLoads):
    @pytest.mark.feature
    def test_declared_tensors_stay_on_the_host_and_their_file_is_not_streamed(self):
        # Turns red when the split is by file, or drops the patterns on the way.
        expected = self.write(
            a=tensors_of("x"), b=tensors_of("l.table.weight", "yy"), c=tensors_of("zzz")
        )
        found = self.load(PATTERNS)
        self.assert_exact(found, expected)
        on_device = {name for name, t in found.items() if self.seen.on_device(t)}
        self.assertEqual(on_device, {"x", "yy", "zzz"})
        self.assertEqual(self.seen.streamed, ["a.safetensors", "c.safetensors"])

    @pytest.mark.feature
    def test_host_tensors_come_last(self):
        # Turns red when two streams of requests compete for one disk.
        self.write(a=tensors_of("l.table.weight"), b=tensors_of("x"))
        self.assertEqual(list(self.load(PATTERNS)), ["x", "l.table.weight"])

    @pytest.mark.guard(mutation="the patterns of a model that declares none are None")
    def test_model_that_declares_nothing_is_one_call(self):
        # Turns red when a plain checkpoint loses its collective call.
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        self.assert_exact(self.load(), expected)
        (call,) = self.seen.calls
        self.assertEqual(len(call.files), 2)

    @pytest.mark.guard(mutation="the switch is not asked")
    def test_switch_gives_the_release_back(self):
        # Turns red when LOADPLAN_DISABLE=1 still splits the work.
        self.write(a=tensors_of("l.table.weight", "x"))
        with mock.patch.dict(os.environ, LOADPLAN_DISABLE="1"):
            found = self.load(PATTERNS)
        self.assertTrue(all(map(self.seen.on_device, found.values())))


if __name__ == "__main__":
    unittest.main()
