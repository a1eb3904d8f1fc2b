"""DeepSeek-V4.1 and its DSpark draft under --load-format instanttensor, whole models.

Their own load_weights runs over real Engram tables; what each parameter holds in the
end is compared with the safetensors format.
"""

import tempfile
import unittest

import pytest
from tiny_tokenspeed_v41 import (
    draft,
    is_table,
    load,
    mapping_of,
    run_ranks,
    target,
    tiny_checkpoint,
    tiny_gpu,
)

ALONE = mapping_of(0, 1)


def load_on_rank(rank, world_size, folder, layout):
    """Load the target twice; the parameters that differ, and the files streamed."""
    mapping = mapping_of(rank, world_size)
    with tiny_gpu() as journal:
        expected = load(target(mapping, layout), folder, "safetensors")
        loaded = load(target(mapping, layout), folder)
    differing = [name for name in expected if loaded[name] != expected[name]]
    return differing, [len(call.files) for call in journal.calls]


class TestDeepseekV41(unittest.TestCase):
    """Needs no GPU."""

    def checkpoint(self, **arrangement):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return folder.name, tiny_checkpoint(folder.name, **arrangement)

    def assert_loads(self, make, folder, **gpu):
        """Loading gives the same bytes as the safetensors format."""
        with tiny_gpu(**gpu) as journal:
            expected = load(make(), folder, "safetensors")
            try:
                loaded = load(make(), folder)
            except ValueError as error:
                self.fail(str(error))
        self.assertEqual(loaded, expected)
        return journal

    @pytest.mark.feature
    def test_target_loads_whichever_way_its_tables_are_sharded(self):
        # Turns red when a shard with a table and something else kills the load.
        for draft_alone in (True, False):
            for layout in ("gpu", "shared", "sharded"):
                with self.subTest(draft_alone=draft_alone, layout=layout):
                    folder, _ = self.checkpoint(
                        tables_alone=False, draft_alone=draft_alone
                    )
                    self.assert_loads(lambda at=layout: target(ALONE, at), folder)

    @pytest.mark.guard(mutation="files without a table are read tensor by tensor")
    def test_target_with_tables_apart_keeps_its_collective_reads(self):
        # Turns red when one file beside the tables leaves the one call.
        folder, _ = self.checkpoint(tables_alone=True, draft_alone=True)
        journal = self.assert_loads(lambda: target(ALONE, "shared"), folder)
        (call,) = journal.calls
        self.assertEqual(len(call.files), 5)

    @pytest.mark.feature
    def test_draft_loads_from_shards_that_it_shares(self):
        # Turns red when the draft meets a tensor that is not its own.
        for tables_alone in (True, False):
            with self.subTest(tables_alone=tables_alone):
                folder, content = self.checkpoint(
                    tables_alone=tables_alone, draft_alone=False
                )
                journal = self.assert_loads(lambda: draft(ALONE), folder)
                self.assertEqual(journal.calls, [])
                self.assertTrue(any(map(is_table, content)))

    @pytest.mark.guard(mutation="the draft's own files are read tensor by tensor")
    def test_draft_in_a_file_of_its_own_reads_only_that(self):
        # Turns red when the draft reads the target a second time.
        folder, content = self.checkpoint(tables_alone=True, draft_alone=True)
        journal = self.assert_loads(lambda: draft(ALONE), folder)
        (call,) = journal.calls
        self.assertEqual(len(call.files), 1)
        own = {name for name in content if name.startswith("mtp.")}
        self.assertEqual(set(journal.names), own)

    @pytest.mark.feature
    def test_older_release_of_the_library_loads_the_same(self):
        # Turns red when 0.1.9 is asked for what came with 0.2.
        folder, _ = self.checkpoint(tables_alone=False, draft_alone=False)
        for make in (lambda: target(ALONE, "sharded"), lambda: draft(ALONE)):
            self.assert_loads(make, folder, version="0.1.9")

    @pytest.mark.feature
    def test_two_ranks_load_mixed_shards_together(self):
        # Turns red when a rank's part of a parameter or of a table is not its own.
        folder, _ = self.checkpoint(tables_alone=False, draft_alone=False)
        for layout in ("gpu", "sharded"):
            with self.subTest(layout=layout):
                try:
                    results = run_ranks(2, load_on_rank, folder, layout)
                except (RuntimeError, TimeoutError) as error:
                    self.fail(str(error))
                self.assertEqual(results, [([], [2]), ([], [2])])


if __name__ == "__main__":
    unittest.main()
