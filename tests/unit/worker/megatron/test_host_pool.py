"""Host memory of checkpoints: used again, and without copies of parts of tensors."""

import torch

from grpo_worker.megatron.checkpoint.host_pool import HostPool


def test_a_copy_has_the_values_and_is_of_the_checkpoint() -> None:
    pool, source = HostPool(), torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    copy = pool.copy(source.t())
    source.zero_()
    assert copy.shape == (4, 3) and copy[1].tolist() == [1.0, 5.0, 9.0]
    assert copy in pool and copy[1] in pool and source not in pool


def test_a_part_gets_a_storage_of_its_own_and_no_copy() -> None:
    pool = HostPool()
    tensor = pool.create(24).view(6, 4)
    part = pool.exact(tensor[2:4])
    assert part.untyped_storage().nbytes() == 8 * 4 and part.shape == (2, 4)
    tensor[2:4] = 7.0
    assert part.eq(7.0).all() and part in pool
    columns, other = tensor[:, 1], torch.ones(4)[1:]
    assert pool.exact(columns) is columns, "it is not one range of memory"
    assert pool.exact(other) is other


def test_blocks_serve_the_next_checkpoint_once_they_are_given_back() -> None:
    pool = HostPool()
    addresses = {pool.create(100).data_ptr(), pool.create(100).data_ptr()}
    written = pool.end()
    assert pool.create(100).data_ptr() not in addresses, "the first one is still being written"
    pool.give_back(written)
    assert {pool.create(100).data_ptr(), pool.create(100).data_ptr()} == addresses


def test_parts_do_not_give_a_block_back_twice() -> None:
    pool = HostPool()
    tensor = pool.create(8)
    pool.exact(tensor[:4]), pool.exact(tensor[4:])
    assert len(pool.end()) == 1 and tensor not in pool
    assert pool.create(0).shape == (0,)
