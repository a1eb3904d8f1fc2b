"""Ranks that load together agree before they read, and hear of each other's failures.

One process is the first of two ranks; what the second says is made up from what the
first one told it.
"""

import dataclasses
import sys
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_tokenspeed_loads import SmallLoads, tensors_of


class TestRanksAgree(SmallLoads):
    def setUp(self):
        super().setUp()
        hosts = SimpleNamespace(group_name="hosts")
        self.ranks(hosts)
        self.steps = []

        def gather(answers, said, group):
            self.assertIs(group, hosts)
            self.steps.append(said[0])
            answers[:] = [said, self.answer(*said)]

        for name, value in (
            ("all_gather_object", gather),
            ("get_rank", lambda group=None: 0),
        ):
            patch = mock.patch.object(torch.distributed, name, value)
            self.stack.enter_context(patch)

    def answer(self, step, error, result):
        """What the second rank says at each exchange."""
        return step, error, result

    @pytest.mark.feature
    def test_other_checkpoint_is_refused_before_anything_is_read(self):
        # Turns red when one rank waits in a collective read that another never enters.
        def answer(step, error, result):
            if step == "the plan":
                result = {"other.safetensors": "digest"}
            return step, error, result

        self.answer = answer
        self.write(a=tensors_of("x"))
        message = "rank 1 would load something else than rank 0"
        with self.assertRaisesRegex(ValueError, message):
            self.load()
        self.assertEqual(self.seen.calls, [])

    @pytest.mark.feature
    def test_failure_of_a_rank_is_raised_on_the_others_by_its_name(self):
        # Turns red when a healthy rank goes on without the broken one.
        self.answer = lambda step, error, result: (step, "OSError: gone", None)
        self.write(a=tensors_of("x"))
        with self.assertRaisesRegex(ValueError, "rank 1 of 2 failed: OSError: gone"):
            self.load()
        self.assertEqual(self.seen.calls, [])

    @pytest.mark.feature
    def test_rank_at_another_step_is_no_peer(self):
        # Turns red when a load that begins anew is paired with one that ends.
        self.answer = lambda step, error, result: ("the end", error, result)
        self.write(a=tensors_of("x"))
        with self.assertRaisesRegex(ValueError, "rank 1 of 2 is at 'the end'"):
            self.load()

    @pytest.mark.feature
    def test_rank_without_the_library_tells_the_others(self):
        # Turns red when it raises by itself and leaves the others waiting.
        self.write(a=tensors_of("x"))
        text = ""
        with mock.patch.dict(sys.modules, instanttensor=None):
            try:
                self.load()
            except Exception as error:
                text = str(error)
        self.assertIn("InstantTensor cannot be imported", text)
        self.assertEqual(self.steps, ["the headers"])

    @pytest.mark.feature
    def test_least_memory_of_the_ranks_decides_for_all(self):
        # Turns red when ranks with different free memory go different ways.
        def answer(step, error, result):
            if step == "the headers":
                node, machine, media = result
                machine = dataclasses.replace(machine, device_budget=63)
                result = node, machine, media
            return step, error, result

        self.answer = answer
        small = {"small": torch.arange(8, dtype=torch.uint8)}
        expected = self.write(a=tensors_of("large"), b=small)
        found = self.load()
        self.assert_exact(found, expected)
        self.assertEqual(self.on_device(found), {"small"})

    @pytest.mark.feature
    def test_ranks_that_agree_meet_before_and_after_the_load(self):
        # Turns red when an exchange is left out, or one more holds every load.
        expected = self.write(a=tensors_of("x"))
        self.assert_exact(self.load(), expected)
        meetings = ["the headers", "the plan", "the end of the load"]
        self.assertEqual(self.steps, meetings)


if __name__ == "__main__":
    unittest.main()
