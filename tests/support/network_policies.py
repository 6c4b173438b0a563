"""Network policies as rules of nftables in the namespaces of pods, for want of a network plugin: who may connect to a
pod, and to whom a pod may. A kubelet reaches its pods whatever they say, as it does in a cluster."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.support.manifests import Document
from tests.support.namespaces import ip_command, run_command
from tests.support.pod import Pod

NFT = shutil.which("nft", path="/usr/sbin:/sbin:/usr/bin:/bin")
_HOOKS = {"Ingress": ("input", "from", "saddr", "iif"), "Egress": ("output", "to", "daddr", "oif")}
"""Of each type of policy: nftables' hook, the field of a rule that has the others, their addresses, and the device."""


def enforce(policies: Sequence[Document], pods: Sequence[Pod]) -> None:
    """Let pods open those connections alone that the policies allow."""
    for pod in pods:
        rules = "\n".join(_rules(pod, policies, pods))
        table = f"table inet policies\ndelete table inet policies\ntable inet policies {{\n{rules}\n}}\n"
        run_command([ip_command(), "netns", "exec", pod.host.namespace, str(NFT), "-f", "-"], stdin=table)


def _rules(pod: Pod, policies: Sequence[Document], pods: Sequence[Pod]) -> Iterator[str]:
    labels = pod.template["metadata"]["labels"]
    for kind, (hook, peers, address, device) in _HOOKS.items():
        of_kind = [one["spec"] for one in policies if kind in one["spec"]["policyTypes"]]
        selecting = [spec for spec in of_kind if _selects(spec["podSelector"], labels)]
        if not selecting:
            continue
        yield f"chain {hook} {{\ntype filter hook {hook} priority 0; policy drop;"
        yield f'ct state established,related accept\n{device} "lo" accept'
        for rule in [rule for spec in selecting for rule in spec[kind.lower()]]:
            who = f"ip {address} {_set(_addresses(rule[peers], pods))} " if peers in rule else ""
            if "ports" not in rule:
                yield f"{who}accept"
            for port in rule.get("ports", ()):
                yield f"{who}{port['protocol'].lower()} dport {pod.ports.get(port['port'], port['port'])} accept"
        yield "}"


def _addresses(peers: Sequence[Document], pods: Sequence[Pod]) -> Iterator[str]:
    for peer in peers:
        (selector,) = peer.values()  # pods of the same namespace
        yield from (pod.host.address for pod in pods if _selects(selector, pod.template["metadata"]["labels"]))


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    for one in selector.get("matchExpressions", ()):
        assert one["operator"] == "NotIn"
        if labels.get(one["key"]) in one["values"]:
            return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _set(addresses: Iterable[str]) -> str:
    return "{ " + ", ".join(sorted(set(addresses)) or ["0.0.0.0"]) + " }"
