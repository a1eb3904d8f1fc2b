# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The plan: which route each tensor takes, decided from headers alone."""

import pytest
from small_vllm_loads import SmallLoads, tensors_of


class TestLoadPlan(SmallLoads):
    def plan(self, *stems, **choices):
        files = [str(self.folder / f"{stem}.safetensors") for stem in stems]
        headers = self.core("header").read_headers(files)
        return self.core("plan").make_plan(headers, **choices)

    def routes(self, *stems, **choices):
        entries = self.plan(*stems, **choices).entries
        return [(entry.tensor.name, entry.route.value) for entry in entries]

    @pytest.mark.feature
    def test_routes_are_skip_host_read_stream(self):
        # Turns red when the order of the routes changes.
        self.write(a=tensors_of("h.x", "no", "yyy"), b=tensors_of("zzzz"))
        found = self.routes(
            "a",
            "b",
            host_resident_weight_patterns=("h.",),
            wanted_weight=lambda name: name != "no",
        )
        assert sorted(found) == [
            ("h.x", "host"),
            ("no", "skip"),
            ("yyy", "read"),
            ("zzzz", "stream"),
        ]

    @pytest.mark.feature
    def test_index_says_which_of_two_copies_counts(self):
        # Turns red when a stale copy wins, or two copies pass without an index.
        self.write(a=tensors_of("x"), b=tensors_of("x", "yy"))
        index = {"x": str(self.folder / "b.safetensors")}
        assert self.routes("a", "b", weight_map=index)[0] == ("x", "skip")
        with pytest.raises(ValueError, match="no index says which one counts"):
            self.plan("a", "b")

    @pytest.mark.feature
    def test_obstacle_sends_a_file_tensor_by_tensor(self):
        # Turns red when a file that the engine cannot stream is streamed.
        self.write(a=tensors_of("x"), b=tensors_of("yy"))
        path = str(self.folder / "a.safetensors")
        found = self.routes("a", "b", obstacles=lambda files: {path: "why"})
        assert found == [("x", "read"), ("yy", "stream")]
