"""Packets of some ports, as anybody on the node's network can read them."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_EVERY, _IPV4 = 0x0003, 0x0800  # the bridge takes packets between pods before the listeners to IPv4 alone
_BUFFER = 256 << 20  # bytes; a packet that does not fit is not seen
_FORCED = 33  # SO_RCVBUFFORCE: beyond the limit for users


class Wire:
    """TCP packets from and to some ports. ``all``: their number. ``clear``: those that contain ``wanted``."""

    def __init__(self, ports: frozenset[int], wanted: bytes) -> None:
        self.all, self.clear = 0, list[bytes]()
        self._ports, self._wanted = ports, wanted

    def see(self, packet: bytes) -> None:
        """Look at an IPv4 packet."""
        header = (packet[0] & 15) * 4
        if packet[9] != socket.IPPROTO_TCP or len(packet) < header + 20:
            return
        if self._ports.isdisjoint(struct.unpack_from("!HH", packet, header)):
            return
        self.all += 1
        if self._wanted in packet:
            self.clear.append(packet[header:])


@contextmanager
def listening(ports: frozenset[int], wanted: bytes) -> Iterator[Wire]:
    """Read the packets of all interfaces of this machine, as root may."""
    wire, ended = Wire(ports, wanted), threading.Event()

    def read(source: socket.socket) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                packet, (_, protocol, *_) = source.recvfrom(1 << 17)
                if protocol == _IPV4:
                    wire.see(packet)

    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_EVERY)) as source:
        source.setsockopt(socket.SOL_SOCKET, _FORCED, _BUFFER)
        source.settimeout(1)
        thread = threading.Thread(target=read, args=(source,))
        thread.start()
        try:
            yield wire
        finally:
            ended.set()
            thread.join()
