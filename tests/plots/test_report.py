"""The report page: complete, self-contained, and working in a real browser."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvpress_prob.plots import write_report
from kvpress_prob.plots.style import styles_of
from kvpress_prob.records import Results
from kvpress_prob.records.statistics import tabulate
from tests.helpers.records import PRESSES, RATIOS, TASKS, made_up_run

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    config, examples, records = made_up_run(5, seeds=(0, 1))
    write_report(folder, Results(config, examples, records), tabulate(records))
    return folder


class Outside(HTMLParser):
    """Collects whatever a page would load or embed."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action") and not value.startswith(("#", "data:,")):
                self.found.append(f"{tag} {name}={value}")


def test_page_loads_nothing(folder):
    page = (folder / "report.html").read_text()
    parser = Outside()
    parser.feed(page)
    assert parser.found == []
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize(("query_aware", "label"), [(False, "query-agnostic"), (True, "query-aware")])
def test_page_says_whether_compression_saw_the_question(tmp_path, query_aware, label):
    """Scenario S32."""
    config, examples, records = made_up_run(2)
    records = [replace(record, query_aware=query_aware) for record in records]
    write_report(tmp_path, Results(config, examples, records), tabulate(records))
    found = re.findall("query-aware|query-agnostic", (tmp_path / "report.html").read_text())
    assert set(found) == {label}


def test_files_beside_the_page(folder):
    pictures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert pictures >= {"score", "win", "score_bytes", "error", "error_abs", "layers_prob_best"}
    assert {f"task_{task}" for task in TASKS} <= pictures
    csv = {path.stem for path in (folder / "figures").glob("*.csv")}
    assert csv == {"scores", "wins", "differences", "budgets", "layers", "errors", "costs"}


def test_page_shows_data_as_text(folder):
    """Markup in a model's answer stays text, inside the data and outside."""
    page = (folder / "report.html").read_text()
    assert page.count("</script>") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["presses"] == list(PRESSES)
    assert any("</script><i>x" in row[5] for row in data["rows"])


ATTACKS = (
    """"><script>alert(1)</script>""", """' onload='alert(1)""", "</pre></dd><img src=x onerror=alert(1)>", "<!-- x",
    "]]></svg><script>", "\\1 \\g<0> $x^$ {{ 7 * 7 }}", "_hidden", "a/../../b", "&lt;b&gt;&amp;",
)  # fmt: skip


class Elements(HTMLParser):
    """Every element with the names of its attributes, and all text."""

    def __init__(self):
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.labels += [value for name, value in attrs if name == "aria-label"]


def elements(page: Path) -> Elements:
    parser = Elements()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


@pytest.mark.parametrize("text", ATTACKS)
def test_text_never_becomes_markup(tmp_path, text):
    """Scenario S59, in every text of a run: the page has the elements that it has with harmless text."""

    def page(text: str, label: str, folder: Path) -> Path:
        config, examples, records = made_up_run(2, presses=("no_press", "prob_best", "snapkv"))
        texts = {"question": text, "answer_prefix": text, "answers": [text, "x"]}
        names = {it.name: f"{text}{i}" for i, it in enumerate(examples)}
        examples = [replace(it, **texts, name=names[it.name], task=f"{it.task}{text}") for it in examples]
        records = [
            replace(
                it, press={"prob_best": label}.get(it.press, it.press), prediction=text, versions=text, git_commit=text,
                example=names[it.example], task=f"{it.task}{text}",
            )
            for it in records
        ]  # fmt: skip
        config |= {"name": text, "model": text, "benchmark": text, "presses": [label], text: text}
        folder.mkdir()
        return write_report(folder, Results(config, examples, records), tabulate(records))

    harmless = elements(page("harmless", "label", tmp_path / "harmless"))
    found = elements(page(text, text, tmp_path / "attack"))
    assert found.elements == harmless.elements
    assert text in found.labels
    assert not any(name.startswith("on") for _, names in found.elements for name in names)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["attack", "harmless"]
    for folder in ("attack", "harmless"):
        assert sorted(it.name for it in (tmp_path / folder).iterdir()) == ["figures", "report.html"]


def test_labels_that_differ_have_files_that_differ(tmp_path):
    config, examples, records = made_up_run(2, presses=("no_press", "prob_best", "prob_min_h"))
    for number, names in enumerate((("a/b", "a b"), ("a:b", "a/b"), ("é?", "é!"), ("x" * 300, "x" * 301), ("?", "!"))):
        labels = dict(zip(("prob_best", "prob_min_h"), names, strict=True))
        renamed = [replace(it, press=labels.get(it.press, it.press)) for it in records]
        folder = tmp_path / str(number)
        folder.mkdir()
        write_report(folder, Results(config, examples, renamed), tabulate(renamed))
        assert len(list((folder / "figures").glob("layers_*.png"))) == 2, names


def test_a_run_without_answers_has_a_page(tmp_path):
    config, examples, records = made_up_run(2)
    silent = [replace(record, score=None, prediction=None, attention_error=None) for record in records]
    page = write_report(tmp_path, Results(config, examples, silent), tabulate(silent))
    assert "Budget by layer" in page.read_text()


def test_styles_tell_presses_apart():
    presses = ["no_press", *(f"prob_{i}" for i in range(9)), *(f"top_{i}" for i in range(9))]
    _, _, (record, *_) = made_up_run(1)
    styles = styles_of(
        [
            replace(record, press=it, masked=it == "top_8", effective_fraction=0.5 if it.startswith("prob") else None)
            for it in presses
        ]
    )
    looks = [(style.colour, style.marker, style.dash) for style in styles.values()]
    assert len(set(looks)) == len(looks)
    assert (styles["prob_0"].dash, styles["top_0"].dash, styles["top_8"].dash) == ("solid", "dashed", "dotted")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if BROWSER is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(folder, browser, width, dark):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    scheme = "dark" if dark else "light"
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    browser.get((folder / "report.html").as_uri())

    def run(script: str, *arguments):
        return browser.execute_script(script, *arguments)

    def column(table: str, index: int) -> list[str]:
        return run(
            "return [...document.querySelectorAll(`[data-table=${arguments[0]}] tbody tr`)]"
            ".map(row => row.cells[arguments[1]].firstChild.data)", table, index,
        )  # fmt: skip

    # Nothing sticks out sideways, text is of readable size, text and paper are far apart.
    assert run("return document.documentElement.scrollWidth") <= width
    heights = "return [...document.querySelectorAll('figure svg text')].map(e => e.getBoundingClientRect().height)"
    assert min(run(heights)) >= 8
    ink, paper = (
        sum(map(int, re.findall(r"\d+", run(f"return getComputedStyle(document.body).{name}"))[:3]))
        for name in ("color", "backgroundColor")
    )
    assert (ink - paper > 450) if dark else (paper - ink > 450)
    assert run("return getComputedStyle(document.querySelector('figure svg text')).fill") == run(
        "return getComputedStyle(document.body).color"
    )

    # Sorting.
    assert column("scores", 0) == list(PRESSES)
    for clicks, reverse in ((1, True), (2, False)):
        run("document.querySelectorAll('[data-table=scores] thead button')[arguments[0]].click()", len(RATIOS))
        values = [float(text) for text in column("scores", len(RATIOS))]
        assert values == sorted(values, reverse=reverse), clicks
    run("document.querySelectorAll('[data-table=scores] thead button')[0].click()")
    assert column("scores", 0) == sorted(PRESSES)

    # Drill-down: another task, the next example, another ratio.
    def choose(name: str, value: str) -> None:
        run(
            "const s = document.querySelector(`[data-choice=${arguments[0]}]`); s.value = arguments[1];"
            "s.dispatchEvent(new Event('change'))", name, value,
        )  # fmt: skip

    choose("task", "vt")
    run("document.querySelector('[data-step=\"1\"]').click()")
    choose("exampleRatio", str(RATIOS[-1]))
    shown = run("return document.getElementById('example').innerText")
    assert "What is the <b>code</b> of vt, number 1?" in shown
    assert run("return document.querySelectorAll('.answer').length") == 1 + 2 * 2 + 3  # two presses with two seeds
    assert run("return document.querySelector('.answer mark').textContent") == "1001"
    assert run("return document.querySelectorAll('.answer i').length") == 0

    choose("other", "knorm")
    choose("ratio", "0.9")
    assert "knorm" not in column("differences", 0)
    assert "higher" in column("differences", 3)

    # The legend hides and highlights.
    run("document.querySelectorAll('.legend button')[1].click()")
    assert run("return document.querySelector('.series-1').style.opacity") == "0"
    run("document.querySelectorAll('.legend button')[2].dispatchEvent(new Event('pointerenter'))")
    assert run("return document.querySelector('.band-2').style.opacity") == "1"
    assert browser.get_log("browser") == []
