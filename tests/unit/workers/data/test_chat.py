"""Chat templates: the same text as transformers renders, and what is refused."""

import datetime
import json
from pathlib import Path

import pytest

from launcher.config.schema import FullConfig
from workers.config import Config, ConfigError, DataConfig, DataKind, ModelConfig, RewardConfig
from workers.config.data import PartConfig
from workers.data.chat import ChatTemplate
from workers.data.prompts import open_prompts
from workers.model.initialize import make_tiny
from workers.rollout.workflows.rendering import question, text_of

TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif %}
{% for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
{{ bos_token }}<|system|>
{% endif %}
    {{- '<|' + message['role'] + '|>' + '\\n' + message['content'] + '<eos>' }}
    {%- if message is mapping %}{{ message | tojson }}{% continue %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|assistant|>
{% endif %}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "model", 1)
    return tmp_path / "model"


def set_config(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_renders_like_transformers(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    set_config(model, bos_token="<eos>")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for text in ("1 + 1 =", 'quotes " and <é>\n', "{{ 7 * 7 }}"):
        messages = [{"role": "user", "content": text}]
        assert ChatTemplate(model).render(text) == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("template", [
    "{% for message in messages %}{% generation %}{% set mark = '|' %}{{ mark }}{{ message.content }}{% endgeneration %}{{ mark }}{% endfor %}",
    "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages | tojson(ensure_ascii=true, indent=1) }}"])
def test_what_transformers_adds_to_templates_is_there(model: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    (model / "chat_template.jinja").write_text(template)
    text = 'é = "1"'
    expected = transformers.AutoTokenizer.from_pretrained(model).apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    assert ChatTemplate(model).render(text) == expected


def test_prompts_are_rendered(model: Path) -> None:
    set_config(model, chat_template="[{{ messages[0].content }}]{% if add_generation_prompt %}>{% endif %}")
    plain = open_prompts(DataConfig(), RewardConfig(), 1)
    chat = open_prompts(DataConfig(chat_template=True), RewardConfig(), 1, model)
    assert chat.train(3).text == f"[{plain.train(3).text}]>"
    assert chat.train(3).reference == plain.train(3).reference
    assert [prompt.text for prompt in chat.heldout()] == [f"[{prompt.text}]>" for prompt in plain.heldout()]


THINKING = "{{ messages[0].content }}{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}</think>{% endif %}"
OWN_DEFAULT = ("{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
               "{{ messages[0].content }}{% if not enable_thinking %}</think>{% endif %}")


@pytest.mark.parametrize("template", [THINKING, OWN_DEFAULT])
def test_values_reach_the_template_of_prompts_and_of_turns(model: Path, template: str) -> None:
    set_config(model, chat_template=template)
    data = DataConfig(chat_template=True, chat_template_kwargs={"enable_thinking": False})
    assert open_prompts(data, RewardConfig(), 1, model).train(0).text.endswith("</think>")
    assert not open_prompts(DataConfig(chat_template=True), RewardConfig(), 1, model).train(0).text.endswith("</think>")
    turn = text_of(Config(model=ModelConfig(path=str(model)), data=data)).opening("1 + 1 =")
    assert turn.endswith("</think>")


def test_the_day_is_one_for_the_whole_run(model: Path) -> None:
    """So that a prompt is the same in every process and at any time, and the question is found in it again."""
    set_config(model, chat_template="Today is {{ strftime_now('%d %b %Y') }}. {{ messages[0].content }}>")
    full = FullConfig(model=ModelConfig(path=str(model)), data=DataConfig(chat_template=True))
    full.settle()
    assert full.data.chat_template_date == datetime.date.today().isoformat()
    full.data.chat_template_date = "2026-03-01"
    full.settle()
    text, template = open_prompts(full.data, RewardConfig(), 1, model).train(0).text, text_of(full)
    assert text.startswith("Today is 01 Mar 2026. ") and question(text, template) == open_prompts(DataConfig(), RewardConfig(), 1).train(0).text
    full.data = DataConfig(kind=DataKind.mixture, chat_template_date="2026-03-01", parts={
        "a": PartConfig(chat_template=True), "b": PartConfig(chat_template=True, chat_template_date="2026-03-02"), "c": PartConfig()})
    full.settle()
    assert [part.chat_template_date for part in full.data.sources()] == ["2026-03-01", "2026-03-02", "2026-03-01"]
    full.data.chat_template_date, full.data.parts = "", {"c": PartConfig()}
    full.settle()
    assert full.data.chat_template_date == "", "nothing is rendered"
    with pytest.raises(ConfigError, match="data.chat_template_date='1 March': must be a day. Write it as 2026-03-01"):
        DataConfig(chat_template=True, chat_template_date="1 March").check()


def test_values_that_would_have_no_effect_are_refused(model: Path) -> None:
    set_config(model, chat_template=THINKING)
    for name in ("thinking", "tools", "bos_token"):
        with pytest.raises(ConfigError, match=f"data.chat_template_kwargs.*does not read '{name}'. It reads enable_thinking"):
            ChatTemplate(model, {name: False})
    with pytest.raises(ConfigError, match=r"data.chat_template_kwargs=.*must be empty with data.chat_template=false"):
        DataConfig(chat_template_kwargs={"enable_thinking": False}).check()


def test_named_templates(model: Path) -> None:
    set_config(model, chat_template=[{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}])
    assert ChatTemplate(model).render("yes") == "yes"


@pytest.mark.parametrize(("template", "message"), [
    (None, "has no chat template"),
    ("{% if %}", "does not compile"),
    ("{{ raise_exception('no users') }}", "cannot render a user's message .no users"),
    ("{{ messages.append(1) }}", "cannot render.*unsafe|cannot render.*not safely callable"),
    ("{{ ''.__class__.__mro__ }}", "cannot render"),
])
def test_refusals(model: Path, template: str | None, message: str) -> None:
    if template is not None:
        set_config(model, chat_template=template)
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(model)


def test_needs_the_models_folder() -> None:
    with pytest.raises(ConfigError, match="Set model.path"):
        open_prompts(DataConfig(chat_template=True), RewardConfig(), 1)
