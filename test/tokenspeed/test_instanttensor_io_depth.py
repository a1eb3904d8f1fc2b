"""How many reads InstantTensor keeps in flight, which sizes its device buffer."""

import tempfile
import unittest
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_tokenspeed_v41 import tiny_gpu

from tokenspeed.runtime.model_loader.weight_utils import instanttensor_weights_iterator


class TestIoDepth(unittest.TestCase):
    """Needs no GPU."""

    def load(self, **options):
        with tempfile.TemporaryDirectory() as folder, tiny_gpu() as journal:
            path = Path(folder, "model.safetensors")
            save_file({"x": torch.ones(8)}, path)
            try:
                weights = instanttensor_weights_iterator(
                    [str(path)], process_group=None, **options
                )
            except TypeError as error:
                self.fail(str(error))
            self.assertEqual([name for name, _ in weights], ["x"])
        (call,) = journal.calls
        return dict(call.kwargs)

    @pytest.mark.feature
    def test_depth_reaches_the_library(self):
        # Turns red when a small load takes the buffer of a large one.
        self.assertEqual(self.load(io_depth=7), {"io_depth": 7})

    @pytest.mark.guard(mutation="None is passed on as a depth")
    def test_library_chooses_where_nobody_does(self):
        # Turns red when a load without a depth is another call than before.
        self.assertEqual(self.load(), {})


if __name__ == "__main__":
    unittest.main()
