"""What a network lab consists of: names, addresses, and the commands that build it.

A lab's hosts are network namespaces, and so are its switches: a bridge in a namespace of its own meets no
firewall of this machine, and goes with its namespace.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass

from gccomm_launch.netlab_rates import burst, check_not_faster, format_rate

__all__ = ["PREFIX", "VARIABLE", "Lab", "address", "build", "namespace"]

PREFIX = "gccomm-lab-"

# Tells ranks the lab that they run in.
VARIABLE = "GCCOMM_NETLAB"

_CORE = "core"
_NETWORK = "10.77.0.0/16"


@dataclass(frozen=True)
class Lab:
    """A network lab.

    Attributes
    ----------
    hosts : int
        Hosts h1, h2, ...
    rate : int
        Bits per second of each host's link, in each direction.
    racks : int
        Switches r1, r2, ..., with as many hosts each as there can be, in order.
    rack_rate : int
        Bits per second of each switch's link to the others; `rate` where there is one rack.
    measured, measured_across : float
        Bytes per second that a TCP connection carried between two hosts, of one rack if there are such, and
        between racks; 0 where that is not known.
    congestion : str
        How TCP between hosts finds how much it may send: by Linux's usual algorithm, whatever this machine is
        set to, so that the lab is the same everywhere.
    """

    hosts: int
    rate: int
    racks: int = 1
    rack_rate: int = 0
    measured: float = 0.0
    measured_across: float = 0.0
    congestion: str = "cubic"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rack_rate", self.rack_rate or self.rate)

    @property
    def names(self) -> list[str]:
        """The hosts' names."""
        return [f"h{number}" for number in range(1, self.hosts + 1)]

    def rack(self, number: int) -> int:
        """Return the rack of host `number`, both counted from 1."""
        return (number - 1) * self.racks // self.hosts + 1

    def path_rate(self, source: int, target: int) -> int:
        """Return the rate of the slowest link between two hosts, in bits per second."""
        return self.rate if self.rack(source) == self.rack(target) else min(self.rate, self.rack_rate)

    def bound(self, payload: int, numbers: Collection[int]) -> float:
        """Return the least seconds of an all-reduce of `payload` bytes over the hosts of these numbers.

        From what the links carry as measured: n hosts, or racks, each have to send 2(n-1)/n of the bytes.
        """
        shares = self._shares(payload, numbers)
        rates = (self.measured, self.measured_across)
        return max(share / speed for share, speed in zip(shares, rates, strict=True) if share)

    def check(self, payload: int, seconds: float, numbers: Collection[int]) -> None:
        """Refuse an all-reduce that was faster than the links' rates allow; see :meth:`bound`.

        Raises
        ------
        FasterThanLinkError
            It was.
        """
        shares = self._shares(payload, numbers)
        for share, bits in zip(shares, (self.rate, self.rack_rate), strict=True):
            check_not_faster(share, seconds, bits)

    def _shares(self, payload: int, numbers: Collection[int]) -> tuple[float, float]:
        """Return what a host and what a rack have to send."""
        hosts, racks = len(set(numbers)), len({self.rack(number) for number in numbers})
        return payload * 2 * (hosts - 1) / hosts, payload * 2 * (racks - 1) / racks

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces."""
        switches = [f"r{number}" for number in range(1, self.racks + 1)]
        core = [_CORE] if self.racks > 1 else []
        return [namespace(name) for name in [*self.names, *switches, *core]]

    def describe(self) -> list[str]:
        """Return what the lab consists of, in lines."""
        names = f"h1 to h{self.hosts}, {address(1)} to {address(self.hosts)}" if self.hosts > 1 else "h1"
        rate = f"{format_rate(self.rate)} each way, TCP {self.congestion}"
        lines = [f"{self.hosts} host{'s'[: self.hosts - 1]} ({names}), {rate}"]
        if self.racks > 1:
            racks = [
                [n for n in range(1, self.hosts + 1) if self.rack(n) == r + 1] for r in range(self.racks)
            ]
            members = "; ".join(" ".join(f"h{n}" for n in rack) for rack in racks)
            lines.append(f"{self.racks} racks ({members}), {format_rate(self.rack_rate)} between them")
        if self.measured:
            across = f", {self.measured_across / 1e6:.1f} MB/s between racks" if self.racks > 1 else ""
            lines.append(f"measured: {self.measured / 1e6:.1f} MB/s{across}")
        return lines

    def hosts_file(self) -> str:
        """Return /etc/hosts of the hosts."""
        lines = [f"{address(number)} h{number}" for number in range(1, self.hosts + 1)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def to_json(self) -> str:
        """Return the lab in one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Lab:
        """Return the lab that :meth:`to_json` has written."""
        return cls(**json.loads(text))

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Lab | None:
        """Return the lab in which this process runs by ``gccomm netlab run``, or None."""
        text = environ.get(VARIABLE)
        return cls.from_json(text) if text else None


def namespace(name: str) -> str:
    """Return the namespace of a host or switch."""
    return PREFIX + name


def address(number: int) -> str:
    """Return the address of host `number`, from 1 on."""
    return f"10.77.{(number - 1) // 250}.{(number - 1) % 250 + 1}"


def build(lab: Lab) -> Iterator[list[str]]:
    """Yield the commands that build a lab, in order."""
    for name in lab.namespaces():
        yield ["ip", "netns", "add", name]
        yield from _inside(name, "ip link set lo up")
    switches = [f"r{number}" for number in range(1, lab.racks + 1)]
    for switch in [*switches, *([_CORE] if lab.racks > 1 else [])]:
        yield from _inside(namespace(switch), "ip link add name bridge type bridge", "ip link set bridge up")
    if lab.racks > 1:
        for switch in switches:
            yield from _link((switch, "uplink"), (_CORE, switch), lab.rack_rate)
    for number, host in enumerate(lab.names, 1):
        switch = f"r{lab.rack(number)}"
        yield from _link((host, "eth0"), (switch, host), lab.rate)
        own = address(number)
        route = f"{_NETWORK} dev eth0 src {own} congctl {lab.congestion}"
        add = f"ip address add {own}/16 dev eth0 noprefixroute"
        yield from _inside(namespace(host), add, f"ip route add {route}")


def _link(low: tuple[str, str], high: tuple[str, str], bits: int) -> Iterator[list[str]]:
    """Join two ends, each a namespace and the name of its interface, and limit what each of them sends.

    The second is a port of that switch; so is the first, where it is no host.
    """
    (first, near), (second, far) = low, high
    yield [
        *("ip", "link", "add", "name", near, "netns", namespace(first), "type", "veth"),
        *("peer", "name", far, "netns", namespace(second)),
    ]
    for place, port in (low, high):
        # A short queue drops the tails of bursts, which makes TCP slower than the link.
        shaper = f"tbf rate {bits}bit burst {burst(bits)}b latency 50ms"
        yield from _inside(namespace(place), f"tc qdisc add dev {port} root {shaper}")
        if not place.startswith("h"):
            yield from _inside(namespace(place), f"ip link set {port} master bridge")
        yield from _inside(namespace(place), f"ip link set {port} up")


def _inside(name: str, *commands: str) -> Iterator[list[str]]:
    for command in commands:
        tool, *arguments = shlex.split(command)
        yield [tool, "-n", name, *arguments]
