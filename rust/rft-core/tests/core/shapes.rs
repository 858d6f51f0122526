//! Filling in a chat gives what rendering it gives, whatever the template and the contents.

use proptest::prelude::*;
use rft_core::example::Parser;
use rft_core::format::Format;
use rft_core::jsonl::Layout;
use rft_core::rows::{Outcome, Rows, Scratch};
use serde_json::{Value, json};

use crate::support::{CHATML, Case, TAGGED};

/// A body for each message of a ChatML-like template.
fn around(body: &str) -> String {
    format!(
        "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{body}<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    )
}

/// Templates that only copy contents, and ask of them what can be told.
fn copying() -> Vec<String> {
    let bodies = [
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content.strip() }}",
        "{{ m.content.rstrip() }}",
        "{{ m.content.lstrip('\\n') }}",
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
        "{% if m.content.startswith('<tool_response>') %}T{% endif %}{{ m.content }}",
        "{% if m.content == 'stop' or m.content | trim == 'halt' %}!{% endif %}{{ m.content }}",
        "{% if m.content in ['yes', 'no'] %}?{% endif %}{{ m.content }}",
        "{% if m.content in 'user assistant' %}?{% endif %}{{ m.content }}",
        "{% if m.content == messages[0].content %}={% endif %}{{ m.content }}",
        "{% if m.tool_calls %}{{ m.tool_calls[0][0] }}{% elif tools and m.content[0] == 'A' %}!{% endif %}{{ m.content }}",
        "{{ m.content.replace('<x>', '') }}",
        "{% if not loop.last %}{{ m.content }}{% else %}<think></think>{{ m.content }}{% endif %}",
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0] }}{% endif %}",
    ];
    let mut all: Vec<String> = bodies.iter().map(|body| around(body)).collect();
    all.extend([CHATML, TAGGED].map(String::from));
    all.push(
        "{% set rest = messages %}{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}|{% set rest = messages[1:] %}{% endif %}\
         {% for m in rest %}{% if m['role'] == 'assistant' %}A: {% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\
         {% else %}[{{ m['role'] | upper }}] {{ m['content'] }}{% endif %}\n{% endfor %}"
            .into(),
    );
    all
}

/// Templates that look into contents in ways that are not told apart.
fn prying() -> Vec<String> {
    [
        "{% if m.content[0] == 'A' %}!{% endif %}{{ m.content }}",
        "{% if m.content[:2] == 'Ab' %}!{% endif %}{{ m.content }}",
        "{% if m.content | lower == 'yes' %}!{% endif %}{{ m.content }}",
        "{% if 'ab' in m.content | lower %}!{% endif %}{{ m.content }}",
        "{% if m.content.lower().startswith('ab') %}!{% endif %}{{ m.content }}",
        "{% if m.content | int %}!{% endif %}{{ m.content }}",
        "{% if m.content | length > 5 %}!{% endif %}{{ m.content }}",
        "{% if m.content > 'm' %}!{% endif %}{{ m.content }}",
        "{% if m.content | first == 'A' %}!{% endif %}{{ m.content }}",
        "{% for word in m.content.split() %}{% if word == 'A' %}!{% endif %}{% endfor %}{{ m.content }}",
        "{% if (m.content ~ 'x') == 'Ax' %}!{% endif %}{{ m.content }}",
        "{% set c = m.content[0] %}{% if c == 'A' %}!{% endif %}{{ m.content }}",
        "{% macro f(t) %}{% if t[0] == 'A' %}!{% endif %}{{ t }}{% endmacro %}{{ f(m.content) }}",
        "{% if m.content.isupper() %}!{% endif %}{{ m.content }}",
        "{% if messages[0].content in m.content %}!{% endif %}{{ m.content }}",
    ]
    .iter()
    .map(|body| around(body))
    .collect()
}

fn content() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("A"),
        Just("Ab"),
        Just("stop"),
        Just("halt"),
        Just("yes"),
        Just("user"),
        Just(" "),
        Just("\n"),
        Just("\t\r"),
        Just("\u{a0}"),
        Just("\u{2003}"),
        Just("\u{1c}"),
        Just("<|im_end|>"),
        Just("<|im_"),
        Just("end|>"),
        Just("<"),
        Just(">"),
        Just("</think>"),
        Just("<think>x"),
        Just("</thi"),
        Just("nk>"),
        Just("<tool_response>"),
        Just("<x>"),
        Just("é😀日本"),
        Just("\"q\" \\ '"),
        Just("{{ 1 }} {% if %}"),
        Just("qz0zq"),
        Just("a longer piece of text, of several words."),
        Just("\u{fdd1}"),
        Just("\u{0}\u{7f}\u{1b}[31m"),
    ];
    prop::collection::vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

fn chats() -> impl Strategy<Value = Value> {
    let role = prop_oneof![3 => Just("user"), 4 => Just("assistant"), 1 => Just("system"), 1 => Just("tool")];
    let turn = (role, content()).prop_map(|(role, content)| json!({"role": role, "content": content}));
    (prop::collection::vec(turn, 1..6), 0..4).prop_map(|(messages, extra)| match extra {
        0 => json!({"id": 7, "messages": messages, "meta": {"a": [1.5, null, "x\n"], "b": true}}),
        1 => json!({"messages": messages, "tools": null, "note": "n"}),
        _ => json!({"messages": messages}),
    })
}

fn agree(spec: &Case, rows: &[String]) {
    let parsed = spec.parsed();
    let parser = Parser::new(Format::Messages, &parsed.sources[0]).unwrap();
    let (filling, rendering) = (Rows::new(&parsed, None).unwrap(), Rows::new(&parsed, None).unwrap().one_by_one());
    let (mut one, mut other) = (Scratch::default(), Scratch::default());
    for row in rows {
        let filled = filling.row(&parser, Layout::Lines, row.as_bytes(), &mut one);
        let rendered = rendering.row(&parser, Layout::Lines, row.as_bytes(), &mut other);
        match (filled, rendered) {
            (Outcome::Kept(filled), Outcome::Kept(rendered)) => {
                // Names of unused fields come in any order.
                assert_eq!(filled.len(), rendered.len(), "{row}");
                for (a, b) in filled.iter().zip(&rendered) {
                    assert_eq!((&a.ids, &a.trained, &a.weights), (&b.ids, &b.trained, &b.weights), "{row}");
                    assert_eq!((a.method, a.straddling, a.lost), (b.method, b.straddling, b.lost), "{row}");
                    assert_eq!((a.spelled, a.facts.roles), (b.spelled, b.facts.roles), "{row}");
                    let sorted = |names: &[String]| {
                        let mut names = names.to_vec();
                        names.sort();
                        names
                    };
                    assert_eq!(sorted(&a.facts.unused), sorted(&b.facts.unused), "{row}");
                }
            }
            (Outcome::Dropped(a), Outcome::Dropped(b)) => assert_eq!(a, b, "{row}"),
            (Outcome::Kept(_), Outcome::Dropped(error)) => panic!("only filled in: {row}: {error:?}"),
            (Outcome::Dropped(error), Outcome::Kept(_)) => panic!("only rendered: {row}: {error:?}"),
        }
    }
}

fn fills(template: &str) -> bool {
    let case = Case::new(&[], template);
    let spec = case.parsed();
    Rows::new(&spec, None).unwrap().fills()
}

#[test]
fn templates_that_copy_contents_are_filled_in_and_others_are_not() {
    for template in copying() {
        assert!(fills(&template), "{template}");
    }
    for template in prying() {
        assert!(!fills(&template), "{template}");
    }
}

/// Templates, alone and with options.
fn combinations() -> Vec<Case> {
    let mut all: Vec<Case> = copying().into_iter().chain(prying()).map(|template| Case::new(&[], &template)).collect();
    for (key, value) in [
        ("train_on", json!("last")),
        ("train_on", json!("all")),
        ("train_on", json!(["user", "assistant"])),
        ("end_of_turn", json!("mask")),
        ("end_of_turn", json!("train")),
        ("control_tokens", json!("allow")),
        ("thinking", json!("keep")),
        ("thinking", json!("template")),
    ] {
        for template in [CHATML, TAGGED, &copying()[5], &copying()[13]] {
            all.push(Case::new(&[], template).with(key, value.clone()));
        }
    }
    all
}

proptest! {
    // Each case loads tokenizers and learns shapes, seconds in a debug build: PROPTEST_CASES for more.
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(1)
    ))]

    #[test]
    fn filling_in_equals_rendering(
        rows in prop::collection::vec(chats(), 25),
        chosen in prop::collection::vec(any::<prop::sample::Index>(), 6),
    ) {
        let rows: Vec<String> = rows.iter().map(Value::to_string).collect();
        let all = combinations();
        for index in chosen {
            agree(index.get(&all), &rows);
        }
    }
}

#[test]
fn odd_json_is_read_as_by_the_other_parser_or_left_to_it() {
    let message = r#"{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}"#;
    let mut rows: Vec<String> = [
        r#"{"messages": [MESSAGES]}"#,
        r#"  {"messages":[MESSAGES]}  "#,
        r#"{"messages": [MESSAGES], "messages": [MESSAGES]}"#,
        r#"{"messages": [MESSAGES], "x": 1, "x": 2}"#,
        r#"{"messages": [MESSAGES], "n": -0.5e3, "m": 12345678901234567890123, "o": 1e999}"#,
        r#"{"messages": [MESSAGES], "n": 01}"#,
        r#"{"messages": [MESSAGES], "n": 1.}"#,
        r#"{"messages": [MESSAGES], "n": -}"#,
        r#"{"messages": [MESSAGES], "n": NaN}"#,
        r#"{"messages": [MESSAGES], "n": nul}"#,
        r#"{"messages": [MESSAGES], "n": null, "t": true, "f": false, "s": "\ud83d\ude00 \u0000"}"#,
        r#"{"messages": [MESSAGES], "s": "\ud83d"}"#,
        r#"{"messages": [MESSAGES], "s": "\x"}"#,
        r#"{"messages": [MESSAGES], "a\u0062": 1}"#,
        r#"{"messages": [MESSAGES],}"#,
        r#"{"messages": [MESSAGES,]}"#,
        r#"{"messages": [MESSAGES]} x"#,
        r#"{"messages": [MESSAGES]"#,
        r#"{"messages": [], "x": 1}"#,
        r#"{"messages": null}"#,
        r#"{}"#,
        r#"[]"#,
        r#"{"messages": [MESSAGES], "tools": []}"#,
        r#"{"messages": [MESSAGES], "tools": [{"name": "f"}]}"#,
        r#"{"messages": [MESSAGES], "loss_weight": 0.5}"#,
        r#"{"messages": [MESSAGES], "conversations": []}"#,
        r#"{"conversations": [MESSAGES]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": null}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "a", "content": "b"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "\ud83d\ude00\n\"\\\/\b\f\t\u00e9"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "\ud83d"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "\ude00\ud83d"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": ["a"]}]}"#,
        r#"{"messages": [MESSAGES, {"role": "bot", "content": "a"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "a", "name": "n"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "a", "tool_calls": null, "train": null}]}"#,
        r#"{"messages": [MESSAGES, {"role": "assistant", "content": "a", "train": false}]}"#,
        r#"{"messages": [MESSAGES, {"content": "a", "role": "assistant"}]}"#,
        r#"{"messages": [MESSAGES, {"rol\u0065": "assistant", "content": "a"}]}"#,
        r#"{"messages": [MESSAGES, {"role": "a\u0073sistant", "content": "a"}]}"#,
    ]
    .iter()
    .map(|row| row.replace("MESSAGES", message))
    .collect();
    for byte in 0..0x20u8 {
        rows.push(format!("{{\"messages\": [{message}], \"s\": \"seven77{}x\"}}", char::from(byte)));
        rows.push(format!("{{\"messages\": [{{\"role\": \"assistant\", \"content\": \"{}\"}}]}}", char::from(byte)));
    }
    for depth in [1, 63, 64, 65, 127, 128, 129, 100_000] {
        rows.push(format!("{{\"messages\": [{message}], \"deep\": {}{}}}", "[".repeat(depth), "]".repeat(depth)));
        rows.push(format!(
            "{{\"messages\": [{message}], \"deep\": {}1{}}}",
            "{\"a\":".repeat(depth),
            "}".repeat(depth)
        ));
    }
    agree(&Case::new(&[], CHATML), &rows);
    agree(&Case::new(&[], TAGGED), &rows);
}

#[test]
fn a_field_that_nothing_uses_may_be_nested_as_deeply_as_it_likes() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let row = format!(
        r#"{{"messages": [{{"role": "user", "content": "Hi"}}, {{"role": "assistant", "content": "Yo"}}], "deep": {deep}}}"#
    );
    let case = Case::of_bytes("rows.jsonl", row.as_bytes(), CHATML);
    assert_eq!(case.made().0["kept"], 1);
    let used = format!(r#"{{"messages": {deep}}}"#);
    let error = Case::of_bytes("rows.jsonl", used.as_bytes(), CHATML)
        .with_source("format", json!("messages"))
        .run()
        .unwrap_err();
    assert!(error.problem.contains("nested") && error.place.contains("messages"), "{error}");
}
