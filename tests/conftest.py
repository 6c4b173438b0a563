"""Chooses how Triton's kernels run: for real on a GPU, elsewhere in its interpreter, on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which other libraries do as well

pytest.register_assert_rewrite("tests.support")
