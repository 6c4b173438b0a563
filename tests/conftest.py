"""Settings of all tests. Triton's kernels run for real on a GPU, elsewhere in its interpreter, on CPU tensors."""

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which other libraries do as well

pytest.register_assert_rewrite("tests.support")

# how long one example takes says nothing on a machine that runs other tests at the same time
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")
