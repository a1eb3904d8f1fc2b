# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ranks that load together agree before they read, and hear of each other's failures.

One process is the first of two ranks; what the second says is made up from what the
first one told it.
"""

import contextlib
import dataclasses
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from small_vllm_loads import SmallLoads, exact, tensors_of

GROUP = SimpleNamespace(group_name="hosts")


@contextlib.contextmanager
def peer(answer):
    """A second rank that answers ``answer(step, error, result)`` at each exchange."""
    steps = []

    def gather(answers, said, group):
        assert group is GROUP
        steps.append(said[0])
        answers[:] = [said, answer(*said)]

    with (
        mock.patch.object(torch.distributed, "all_gather_object", gather),
        mock.patch.object(torch.distributed, "get_rank", lambda group=None: 0),
    ):
        yield steps


def same(step, error, result):
    return step, error, result


class TestRanksAgree(SmallLoads):
    def failure(self, answer):
        """How the load of one small file fails."""
        self.ranks(GROUP)
        self.write(a=tensors_of("x"))
        with peer(answer), pytest.raises(ValueError) as caught:
            self.load()
        return str(caught.value)

    @pytest.mark.feature
    def test_other_checkpoint_is_refused_before_anything_is_read(self):
        # Turns red when one rank waits in a collective read that another never enters.
        def answer(step, error, result):
            if step == "the plan":
                result = {"other.safetensors": "digest"}
            return step, error, result

        text = self.failure(answer)
        assert "rank 1 would load something else than rank 0" in text
        assert self.seen.calls == []

    @pytest.mark.feature
    def test_failure_of_a_rank_is_raised_on_the_others_by_its_name(self):
        # Turns red when a healthy rank goes on without the broken one.
        def answer(step, error, result):
            return step, "ShortFileError: cut off", None

        assert "rank 1 of 2 failed: ShortFileError: cut off" in self.failure(answer)
        assert self.seen.calls == []

    @pytest.mark.feature
    def test_rank_at_another_step_is_no_peer(self):
        # Turns red when a load that begins anew is paired with one that ends.
        def answer(step, error, result):
            return "the end of the load", error, result

        assert "rank 1 of 2 is at 'the end of the load'" in self.failure(answer)

    @pytest.mark.feature
    def test_rank_without_the_library_tells_the_others(self):
        # Turns red when it raises by itself and leaves the others waiting.
        self.ranks(GROUP)
        self.write(a=tensors_of("x"))
        text = ""
        with peer(same) as steps, mock.patch.dict(sys.modules, instanttensor=None):
            try:
                self.load()
            except Exception as error:
                text = str(error)
        assert "InstantTensor cannot be imported" in text
        assert steps == ["the headers"]

    @pytest.mark.feature
    def test_least_memory_of_the_ranks_decides_for_all(self):
        # Turns red when ranks with different free memory go different ways.
        def answer(step, error, result):
            if step == "the headers":
                node, machine, media = result
                machine = dataclasses.replace(machine, device_budget=63)
                result = node, machine, media
            return step, error, result

        self.ranks(GROUP)
        small = {"small": torch.arange(8, dtype=torch.uint8)}
        expected = self.write(a=tensors_of("large"), b=small)
        with peer(answer):
            found = self.load()
        assert exact(found) == expected
        assert self.on_device(found) == {"small"}

    @pytest.mark.feature
    def test_ranks_that_agree_meet_before_and_after_the_load(self):
        # Turns red when an exchange is left out, or one more holds every load.
        self.ranks(GROUP)
        expected = self.write(a=tensors_of("x"))
        with peer(same) as steps:
            assert exact(self.load()) == expected
        assert steps == ["the headers", "the plan", "the end of the load"]
