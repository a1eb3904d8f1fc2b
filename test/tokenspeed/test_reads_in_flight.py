"""How many reads InstantTensor keeps in flight, which sizes its device buffer."""

import unittest

import pytest
from small_tokenspeed_loads import SmallLoads, tensors_of

from tokenspeed.runtime.model_loader.weight_utils import instanttensor_weights_iterator


class TestReadsInFlight(SmallLoads):
    def options(self, **given):
        """What the library is asked for beside the files."""
        expected = self.write(a=tensors_of("x"))
        try:
            weights = instanttensor_weights_iterator(
                [str(self.folder / "a.safetensors")], process_group=None, **given
            )
        except TypeError as error:
            self.fail(str(error))
        self.assert_exact(dict(weights), expected)
        (call,) = self.seen.calls
        return call.options

    @pytest.mark.feature
    def test_depth_reaches_instanttensor(self):
        # Turns red when a small load takes the buffer of a large one.
        self.assertEqual(self.options(io_depth=7), {"io_depth": 7})

    @pytest.mark.guard(mutation="None is passed on as a depth")
    def test_instanttensor_chooses_where_nobody_does(self):
        # Turns red when a load without a depth is another call than before.
        self.assertEqual(self.options(), {})


if __name__ == "__main__":
    unittest.main()
