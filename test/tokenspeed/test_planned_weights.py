"""Weights under --load-format instanttensor: what is read, and what is not."""

import os
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_tokenspeed_loads import SmallLoads, tensors_of


def is_mtp(name):
    return name.startswith("mtp.")


class TestPlannedWeights(SmallLoads):
    @pytest.mark.feature
    def test_filter_selects_tensors_of_a_shared_file(self):
        # Turns red when the filter stops at shards.
        expected = self.write(a=tensors_of("mtp.x", "yy"), b=tensors_of("mtp.zz"))
        self.write(c=tensors_of("zzz"))
        found = self.load(wanted=is_mtp)
        del expected["yy"]
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), {"mtp.x", "mtp.zz"})
        self.assertEqual(self.seen.streamed, ["b.safetensors"])

    @pytest.mark.feature
    def test_host_resident_weights_stay_on_the_host_and_come_last(self):
        # Turns red when a table is streamed to a device that it does not fit, or two
        # streams of requests compete for one disk.
        expected = self.write(a=tensors_of("l.table.weight", "x"), b=tensors_of("yy"))
        found = self.load(patterns=(".table.",))
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), {"x", "yy"})
        self.assertEqual(list(found)[-1], "l.table.weight")
        self.assertEqual(self.seen.streamed, ["b.safetensors"])

    @pytest.mark.feature
    def test_sub_byte_tensor_that_nobody_wants_turns_nothing_away(self):
        # Turns red when one F4 tensor of the target kills a draft's load.
        values = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        expected = self.write(a=tensors_of("mtp.x") | {"odd": values})
        try:
            found = self.load(wanted=is_mtp)
        except ValueError as error:
            self.fail(str(error))
        del expected["odd"]
        self.assert_exact(found, expected)

    @pytest.mark.feature
    def test_model_that_accepts_nothing_is_told_so(self):
        # Turns red when a draft comes up without a weight.
        self.write(a=tensors_of("x"))
        with self.assertRaisesRegex(ValueError, "the model accepts none of 1 tensors"):
            self.load(wanted=is_mtp)

    @pytest.mark.guard(mutation="the group is not passed on")
    def test_nothing_to_split_is_one_collective_call(self):
        # Turns red when a plain checkpoint loses its collective call.
        device = self.ranks(hosts=SimpleNamespace(group_name="hosts"))
        # Ranks that exchange nothing: all are this one.
        alone = mock.patch.object(torch.distributed, "all_gather_object", repeated)
        first = mock.patch.object(torch.distributed, "get_rank", lambda group=None: 0)
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        with alone, first:
            found = self.load()
        self.assert_exact(found, expected)
        (call,) = self.seen.calls
        self.assertIs(call.group, device)
        self.assertEqual(len(call.files), 2)

    @pytest.mark.guard(mutation="the switch is not asked")
    def test_switch_gives_the_release_back(self):
        # Turns red when LOADPLAN_DISABLE=1 still splits the work.
        expected = self.write(a=tensors_of("l.table.weight", "x"))
        with mock.patch.dict(os.environ, LOADPLAN_DISABLE="1"):
            found = self.load(patterns=(".table.",))
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), set(found))

    @pytest.mark.guard(mutation="another load format is planned")
    def test_other_load_formats_are_untouched(self):
        # Turns red when the safetensors format reads by a plan.
        expected = self.write(a=tensors_of("x"), b=tensors_of("yy"))
        found = self.load(load_format="safetensors")
        self.assert_exact(found, expected)
        self.assertEqual((self.on_device(found), self.seen.calls), (set(), []))


def repeated(answers, said, group):
    answers[:] = [said] * len(answers)


if __name__ == "__main__":
    unittest.main()
