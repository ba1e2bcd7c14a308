"""Lists on the command line, as people type them."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvpress_prob.command_line import parse
from kvpress_prob.sweeps.configuration import SweepConfig


@dataclass(frozen=True)
class Settings:
    ratios: list[float] = field(default_factory=lambda: [0.9])
    seeds: list[int] | None = None
    tasks: list[str] | None = None
    size: int = 3


def run(config: Settings, label: list[str] | None = None, parts: list[float] = [0.1, 0.2], depth: int = -1) -> None:  # noqa: B006
    """Run.

    Parameters
    ----------
    config
        What.
    label
        Names.
    parts
        Numbers.
    depth
        One number.
    """


def parsed(*words: str) -> dict:
    return parse({"run": run}, ["run", *words], "0")[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--ratios 0.2 0.5", [0.2, 0.5]), ("--ratios 0.2", [0.2]), ("--ratios=0.2 0.5", [0.2, 0.5]),
        ("--ratios [0.2,0.5]", [0.2, 0.5]), ("--ratios=[0.2,0.5]", [0.2, 0.5]), ("--ratios 0.2,0.5", [0.2, 0.5]),
        ("--ratios 0.2 --ratios 0.5", [0.2, 0.5]), ("--ratios 0.2 --size 4 --ratios=0.5 1e-3", [0.2, 0.5, 1e-3]),
        ("--ratios 0.2 0.5 --size 4", [0.2, 0.5]), ("--ratios -1 .5 -.5", [-1, 0.5, -0.5]), ("", [0.9]),
        ("--ratios 1", [1]),
    ],
)  # fmt: skip
def test_lists_of_numbers(words, wanted):
    """Scenario S60."""
    assert parsed(*words.split())["config"].ratios == wanted
    parts = parsed(*words.replace("ratios", "parts").split())["parts"]
    assert parts == (wanted if words else [0.1, 0.2])


@pytest.mark.parametrize("name", ["--config", None])
def test_lists_win_over_the_file(tmp_path, name):
    (tmp_path / "a.yaml").write_text("ratios: [0.1, 0.2, 0.3]\nseeds: [7]\ntasks: [vt]\n")
    words = [str(tmp_path / "a.yaml"), "--ratios", "0.5", "--tasks", "cwe", "fwe"]
    config = parsed(*([name, *words] if name else words))["config"]
    assert (config.ratios, config.seeds, config.tasks) == ([0.5], [7], ["cwe", "fwe"])


@pytest.mark.parametrize(
    "words",
    [["a b", "it's: [x]"], ["{not: yaml}"], ["3"], ["null"], ["é\u2028"], ["a,b"], ["#"], ["- x"][:0] or ["x=y"]],
)
def test_words_of_a_text_stay_words(words):
    assert parsed("--label", *words)["label"] == words
    assert parsed(*(word for text in words for word in ("--label", text)))["label"] == words


def test_numbers_below_zero_are_no_options():
    options = parsed("--depth", "-3", "--seeds", "-1", "2")
    assert (options["depth"], options["config"].seeds) == (-3, [-1, 2])


@pytest.mark.parametrize("words", [["--ratios", "many"], ["--ratios"], ["--ratios", "0.5", "x"], ["--seeds", "0.5"]])
def test_what_is_no_number_is_refused(words):
    if words == ["--ratios"]:
        assert parsed(*words)["config"].ratios == []
        return
    with pytest.raises(Exception, match="Expected a"):
        parsed(*words)


@pytest.mark.parametrize("how", ["{}", "--config {}", "--config={}"])
@pytest.mark.parametrize("text", ["ratios: [0.1]\nsize: 4\nratios: [0.2]\n", "size: 3\ntasks:\n- {a: 1, a: 2}\n"])
def test_a_key_that_comes_twice_is_named_with_its_line(tmp_path, how, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"a.yaml': keys must be different .*, got '(ratios|a)' twice\s.* line 3"):
        parsed(*how.format(tmp_path / "a.yaml").split())


HUGE = "1" * 400


@pytest.mark.parametrize("text", [f"ratios: [0.1]\nsize: {HUGE}\n", f"ratios: [0.1,\n {13 * HUGE}]\n"])
def test_huge_numbers_of_a_file_are_named_with_their_line(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"a.yaml': numbers must be ones that a float can hold, got '1*'\s.* line 2"):
        parsed(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("words", "said"), [(["--ratios", "0.5", HUGE], "--config.ratios="), (["--parts", f"[{HUGE}]"], "--parts=")]
)
def test_huge_numbers_of_options_are_named(words, said):
    with pytest.raises(ValueError, match=rf"numbers of options must be ones that a float can hold, got .*{said}\[.*1"):
        parsed(*words)


def test_merged_keys_may_be_changed(tmp_path):
    (tmp_path / "a.yaml").write_text("ratios: [0.1]\n<<: {size: 4, ratios: [0.2]}\n")
    config = parsed(str(tmp_path / "a.yaml"))["config"]
    assert (config.ratios, config.size) == ([0.1], 4)


def test_presses_by_name(tmp_path):
    def sweep(config: SweepConfig, output: Path = Path("results")) -> None:
        """Sweep."""

    words = ["sweep", "--name", "x", "--model", "m", "--ratios", "0.2", "0.5", "--seeds", "0", "1", "--presses",
             "no_press", "{press: snapkv, label: it}", "prob_min", "--tasks", "vt", "--output", "out"]  # fmt: skip
    options = parse({"sweep": sweep}, words, "0")[1]
    config = options["config"]
    assert [spec.name for spec in config.specs] == ["no_press", "it", "prob_min"]
    assert (config.ratios, config.seeds, config.tasks, options["output"]) == ([0.2, 0.5], [0, 1], ["vt"], Path("out"))
