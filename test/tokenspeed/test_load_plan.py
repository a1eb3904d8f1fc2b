"""The plan: which route each tensor takes, decided from headers alone."""

import unittest

import pytest
from small_tokenspeed_loads import SmallLoads, tensors_of


class TestLoadPlan(SmallLoads):
    def routes(self, *stems, **choices):
        files = [str(self.folder / f"{stem}.safetensors") for stem in stems]
        headers = self.module("loadplan.header").read_headers(files)
        plan = self.module("loadplan.plan").make_plan(headers, **choices)
        return [(entry.tensor.name, entry.route.value) for entry in plan.entries]

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
        self.assertEqual(
            sorted(found),
            [("h.x", "host"), ("no", "skip"), ("yyy", "read"), ("zzzz", "stream")],
        )

    @pytest.mark.feature
    def test_index_says_which_of_two_copies_counts(self):
        # Turns red when a stale copy wins, or two copies pass without an index.
        self.write(a=tensors_of("x"), b=tensors_of("x", "yy"))
        index = {"x": str(self.folder / "b.safetensors")}
        self.assertEqual(self.routes("a", "b", weight_map=index)[0], ("x", "skip"))
        with self.assertRaisesRegex(ValueError, "no index says which one counts"):
            self.routes("a", "b")

    @pytest.mark.feature
    def test_obstacle_sends_a_file_tensor_by_tensor(self):
        # Turns red when a file that the engine cannot stream is streamed.
        self.write(a=tensors_of("x"), b=tensors_of("yy"))
        path = str(self.folder / "a.safetensors")
        found = self.routes("a", "b", obstacles=lambda files: {path: "why"})
        self.assertEqual(found, [("x", "read"), ("yy", "stream")])


if __name__ == "__main__":
    unittest.main()
