import torch

from triptych.layers.pinned import ALIGNMENT, packed, to_cpu, to_device, unpacked

TENSORS = [
    torch.arange(3),
    torch.empty(0, 5),
    torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    torch.tensor([True, False, True]),
    torch.arange(12.0).view(3, 4).T,
]


def test_tensors_of_all_dtypes_are_packed_into_one() -> None:
    buffer = packed(TENSORS)
    views = unpacked(buffer, TENSORS)
    for view, tensor in zip(views, TENSORS, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
        assert (view.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert len(buffer) == 32 + 16 + 16 + 48


def test_a_larger_buffer_holds_the_same_layout() -> None:
    larger = torch.zeros(1000, dtype=torch.uint8)
    buffer = packed(TENSORS)
    larger[: len(buffer)] = buffer
    assert all(torch.equal(*pair) for pair in zip(unpacked(larger, TENSORS), TENSORS, strict=True))


def test_nothing_is_copied_on_a_cpu() -> None:
    for moved in (to_device(TENSORS, torch.device("cpu")), to_cpu(TENSORS)):
        assert all(one is other for one, other in zip(moved, TENSORS, strict=True))
    assert to_cpu([]) == []
