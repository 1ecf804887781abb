"""Options, addresses and folders of a test cluster."""

from pathlib import Path

import pytest

from tools.testcluster import __main__ as commands
from tools.testcluster.errors import ClusterError
from tools.testcluster.layout import Addresses, Options, Paths, node_index
from tools.testcluster.network import free_net


def test_options_survive_json():
    options = Options(
        nodes=3,
        feature_gates=("A=true",),
        runtime_config=("batch/v2alpha1=true", "api/all=false"),
        extended_resources=("nvidia.com/gpu=4",),
    )
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize("nodes", [0, 101])
def test_a_node_count_that_cannot_be_is_refused(nodes: int):
    with pytest.raises(ClusterError, match="1 to 100 real nodes"):
        Options(nodes=nodes)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--node-disk-gib", "1 to 4096 GiB of a node's disk, not -1"),
        ("--dra-devices", "0 to 128 fake devices per node, not -1"),
        ("--kwok-nodes", "0 to 5000 kwok nodes, not -1"),
        ("--node-grace-s", "1 to 3600 seconds that a silent node counts as Ready, not -1"),
    ],
)
def test_a_number_that_cannot_be_is_one_sentence(capsys: pytest.CaptureFixture[str], option: str, sentence: str):
    assert commands.main(["up", "--name", "never", option, "-1"]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("pair", ["gpu=4", "nvidia.com/gpu", "nvidia.com/gpu=many"])
def test_an_extended_resource_that_is_none_is_refused(pair: str):
    with pytest.raises(ClusterError, match=r"vendor\.example/name=COUNT"):
        Options(extended_resources=(pair,))


@pytest.mark.parametrize("gate", ["A", "A=", "A=True", "A=1", "A=true,B=true", "=true"])
def test_a_gate_that_components_would_read_differently_is_refused(gate: str):
    with pytest.raises(ClusterError, match="is not of the form Name=true or Name=false"):
        Options(feature_gates=(gate,))
    with pytest.raises(ClusterError, match="is not of the form group/version=true"):
        Options(runtime_config=(gate,))


def test_addresses_of_different_parts_do_not_meet():
    addresses = Addresses(net=70)
    assert addresses.node(1) == "10.70.0.11"
    assert addresses.node_pods(1) == "10.70.129.0/24"
    assert addresses.dns_service == "10.70.16.10"
    assert len(addresses.machine_device) <= 15


def test_the_lowest_free_subnet_is_taken():
    assert free_net([]) == 64
    assert free_net(["default", "10.64.0.0/16", "10.65.7.0/24", "192.0.2.1"]) == 66


def test_no_free_subnet_is_named():
    with pytest.raises(ClusterError, match=r"from 10\.64\.0\.0/16 to 10\.127\.0\.0/16 is taken"):
        free_net(["10.0.0.0/8"])


def test_what_is_in_the_way_is_told_apart_from_test_clusters():
    with pytest.raises(ClusterError, match=r"by the routes to 10\.0\.0\.0/8 that it has; end the VPN or network"):
        free_net(["10.0.0.0/8", "10.64.0.0/16"])
    with pytest.raises(ClusterError, match="take a test cluster down"):
        free_net([f"10.{net}.0.0/16" for net in range(64, 128)])


def test_a_vpn_that_is_the_default_takes_no_subnet():
    assert free_net(["0.0.0.0/1", "128.0.0.0/1", "0.0.0.0/0"]) == 64


@pytest.mark.parametrize("name", ["", "Dev", "-x", "a" * 25, "a/b", "../x"])
def test_a_name_that_would_not_fit_everywhere_is_refused(name: str):
    with pytest.raises(ClusterError, match="wanted up to 24"):
        Paths.of(name)


def test_a_state_folder_that_nodes_would_hide_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", "/var/lib/state")
    with pytest.raises(ClusterError, match="set RLINF_TESTCLUSTER_STATE to a folder elsewhere"):
        Paths.of("dev")


def test_the_state_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path))
    assert Paths.of("dev").root == tmp_path.resolve() / "dev"


def test_a_node_that_is_not_real_has_no_index():
    assert node_index("node-12") == 12
    with pytest.raises(ClusterError, match="kwok-1"):
        node_index("kwok-1")
