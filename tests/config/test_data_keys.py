"""The data group: sources, columns, and keys that exclude each other."""

from __future__ import annotations

import pytest

from kt_ray.config.compose import compose
from kt_ray.errors import UserError

DEMO = ["model=demo", "mode=preview"]


def test_columns_and_sources_from_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    config = compose([*DEMO, "data.path=faq.csv", "data.columns={instruction:question,output:answer}"])
    assert config.data.columns == {"instruction": "question", "output": "answer"}
    assert config.data.path == f"{tmp_path}/faq.csv"
    config = compose([*DEMO, "data=jsonl", "data.sources=[{path:a.jsonl,weight:2},{path:'hf://o/n'}]"])
    assert config.data.sources == [{"path": f"{tmp_path}/a.jsonl", "weight": 2}, {"path": "hf://o/n"}]
    assert config.data.builtin is None


BAD = [
    (["data.sources=[]"], r"data\.sources=\[\] names no source"),
    (["data.sources=[a.jsonl]"], r"data\.sources\[0\]=a\.jsonl is no mapping"),
    (["data.sources=[{weight:2}]"], r"data\.sources\[0\]\.path=null names no file"),
    (["data.sources=[{path:a,wieght:2}]"], r"data\.sources\[0\]\.wieght=2 is not known; did you mean weight"),
    (["data.sources=[{path:a,weight:x}]"], r"data\.sources\[0\]\.weight=x has the wrong type.*int or float"),
    (["data.sources=[{path:a,weight:0}]"], r"data\.sources\[0\]\.weight=0 is out of range"),
    (["data.sources=[{path:a,weight:inf}]"], r"data\.sources\[0\]\.weight=inf is out of range"),
    (["data.sources=[{path:[a,null]}]"], r"data\.sources\[0\]\.path=\[a,null\] names no file"),
    (["data.sources=[{path:[a,'']}]"], r"data\.sources\[0\]\.path=\[a,\] names no file.*list of files"),
    (["data.sources=[{path:a,format:csv}]"], r"data\.sources\[0\]\.format=csv is not known"),
    (["data.path=a.jsonl", "data.sources=[{path:a}]"], r"data\.sources.*data\.path.*both name rows"),
    (["data.limit=3", "data.sources=[{path:a}]"], r"data\.limit=3 would cut the list.*limit in each source"),
    (["data.path=a.jsonl", "data.columns={instruction:3}"], r"data\.columns\.instruction=3 names no column"),
    (
        ["data=demo", "data.packing=true", "data.group_by_length=true"],
        r"data\.group_by_length=true has nothing",
    ),
    (["data=demo", "data.template=qwen", "model.chat_template=t.jinja"], "both name a template"),
    (["data=demo", "data.date=3.2.2024"], r"data\.date=3\.2\.2024 is no date"),
    (["data=demo", "data.template=vicuna"], r"data\.template=vicuna"),
    (["data=demo", "data.train_on=first"], r"data\.train_on=first.*all or last"),
    (["data=demo", "data.cache_gb=-1"], r"data\.cache_gb=-1.*at least 0"),
]


@pytest.mark.parametrize(("overrides", "expected"), BAD, ids=[" ".join(o) for o, _ in BAD])
def test_refused(overrides: list[str], expected: str) -> None:
    implied = [] if any(o.startswith(("data=", "data.path")) for o in overrides) else ["data=jsonl"]
    with pytest.raises(UserError, match=expected) as caught:
        compose([*DEMO, *implied, *overrides])
    assert caught.value.remedy
