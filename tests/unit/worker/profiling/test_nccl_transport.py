"""Reading of NCCL's log. The lines are those that users and projects have published, of NCCL 2.19 to 2.30."""

import pytest

from grpo_worker.profiling.nccl_transport import Transport, transport_of

# github.com/NVIDIA/nccl-tests/issues/185: RoCE on two hosts.
ROCE = """\
dgxh100-4:460770:460770 [0] NCCL INFO Bootstrap : Using enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460770 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: cannot open shared object file: \
No such file or directory No plugin found (libnccl-net.so), using internal implementation
dgxh100-4:460770:460770 [0] NCCL INFO cudaDriverVersion 12000
NCCL version 2.19.3+cuda12.3
dgxh100-4:460770:460842 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; \
OOB enp220s0np0:11.1.128.136<0>
dgxh100-4:460770:460842 [0] NCCL INFO Using non-device net plugin version 0
dgxh100-4:460770:460842 [0] NCCL INFO Using network IB
"""
# github.com/NVIDIA/nccl/issues/1357: the plugin of HPC-X, whose adapters the line of NET/IB names.
SHARP = """\
qh100-gpu19:49357:49418 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP \
[2]mlx5_4:1/IB/SHARP [3]mlx5_5:1/IB/SHARP [RO]; OOB ibp25s0:10.20.0.119<0>
qh100-gpu19:49357:49418 [3] NCCL INFO Using network IBext
"""
# NCCL 2.27.5 of a host without adapters.
NO_ADAPTER = """\
desktop:1463327:1463327 [1] NCCL INFO Bootstrap: Using enp6s0:192.168.68.52<0>
desktop:1463327:1463327 [1] NCCL INFO NCCL version 2.27.5+cuda12.9
desktop:1463327:1463515 [1] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. \

desktop:1463327:1463515 [1] NCCL INFO NET/IB : No device found.
desktop:1463327:1463515 [1] NCCL INFO NET/IB : Using [RO]; OOB enp6s0:192.168.68.52<0>
desktop:1463326:1463512 [0] NCCL INFO NET/Socket : Using [0]enp6s0:192.168.68.52<0> \
[1]veth4debc6c:fe80::942d:3fff:fe48:4386%veth4debc6c<0>
desktop:1463326:1463512 [0] NCCL INFO Initialized NET plugin Socket
desktop:1463326:1463512 [0] NCCL INFO Assigned NET plugin Socket to comm
desktop:1463326:1463512 [0] NCCL INFO Using network Socket
"""
# NCCL 2.27.7 with RDMA disabled and a plugin that failed.
DISABLED = """\
[2026-01-02 10:24:27] ip-172-31-3-153:35113:35467 [0] nccl_net_ofi_init_v6(ncclDebugLogger_t):162 NCCL WARN \
NET/OFI Initializing plugin failed
ip-172-31-3-153:35113:35467 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
ip-172-31-3-153:35113:35467 [0] NCCL INFO NET/Socket : Using [0]ens32:172.31.3.153<0>
ip-172-31-3-153:35113:35467 [0] NCCL INFO Using network Socket
"""
# NCCL 2.28.3 with the plugin of AWS, whose name has a space.
LIBFABRIC = """\
NCCL INFO NCCL version 2.28.3+cuda12.9
NCCL INFO NET/Plugin: Loaded net plugin AWS Libfabric (v6)
NCCL INFO NET/OFI Selected Provider is cxi (found 2 nics)
NCCL INFO Using network AWS Libfabric
"""
# NCCL's documentation of NCCL_DEBUG, 2.30.
IN_2_30 = """\
node-01:3873285:3873285 [0] NCCL INFO Initialized NET plugin IB
node-01:3873285:3873285 [0] NCCL INFO Assigned NET plugin IB to comm
node-01:3873285:3873285 [0] NCCL INFO Assigned GIN plugin GIN_XXXX to comm
node-01:3873285:3873285 [0] NCCL INFO Using network IB
node-01:3873285:3873285 [0] NCCL INFO DMA-BUF is available on GPU device 0
"""
# Connections, from github.com/NVIDIA/nccl/issues/1538 and 952, and other published logs.
DIRECT = """\
node-8:207008:207008 [1] NCCL INFO Channel 02/0 : 9[1] -> 8[0] via P2P/IPC
node-8:207007:207007 [0] NCCL INFO Channel 07/0 : 8[0] -> 7[7] [send] via NET/IB/0/GDRDMA
worker-0:5663:5809 [0] NCCL INFO Channel 04/0 : 0[0] -> 7[7] via P2P/CUMEM
worker-0:5663:5809 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/2(3)/GDRDMA
"""
THROUGH_HOST = """\
cluster:926:1151 [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
cluster:920:1145 [2] NCCL INFO Channel 00/0 : 10[2] -> 9[1] via P2P/IPC/read
cluster:921:1146 [2] NCCL INFO Channel 07 : 4[4] -> 2[2] via SHM/direct/direct
"""


@pytest.mark.parametrize(
    ("log", "expected", "text"),
    [
        (ROCE, Transport("IB", ("mlx5_10", "mlx5_11")), "IB (mlx5_10, mlx5_11)"),
        (SHARP, Transport("IBext", ("mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5")), "IBext (4 devices)"),
        (
            NO_ADAPTER,
            Transport("Socket", ("enp6s0", "veth4debc6c"), no_adapter=True),
            "Socket (enp6s0, veth4debc6c)",
        ),
        (DISABLED, Transport("Socket", ("ens32",)), "Socket (ens32)"),
        (LIBFABRIC, Transport("AWS Libfabric"), "AWS Libfabric"),
        (IN_2_30, Transport("IB"), "IB"),
        (DIRECT, Transport(gpu_direct=True, local=frozenset({"P2P/IPC", "P2P/CUMEM"})), "not known"),
        (THROUGH_HOST, Transport(gpu_direct=False, local=frozenset({"P2P/IPC", "SHM/direct"})), "not known"),
        ("", Transport(), "not known"),
    ],
    ids=[
        "RoCE",
        "SHARP",
        "no adapter",
        "disabled",
        "Libfabric",
        "2.30",
        "direct",
        "through the host",
        "nothing",
    ],
)
def test_published_logs_are_read(log: str, expected: Transport, text: str) -> None:
    found = transport_of(log.splitlines(keepends=True))
    assert found == expected and str(found) == text


def test_one_connection_through_the_host_counts() -> None:
    assert transport_of([*DIRECT.splitlines(), *THROUGH_HOST.splitlines()]).gpu_direct is False


def test_the_adapters_of_a_network_that_is_not_used_are_left_out() -> None:
    unused = [*ROCE.splitlines()[:-1], *DISABLED.splitlines()[2:]]
    assert transport_of(unused) == Transport("Socket", ("ens32",))
