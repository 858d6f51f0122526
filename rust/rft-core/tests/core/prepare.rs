use std::collections::HashSet;

use proptest::prelude::*;
use rft_core::prepare::{Observer, prepare};
use rft_core::rows::Renderer;
use rft_core::template::{Rendered, Template};
use rft_core::{Error, Kind, key};
use serde_json::{Value, json};

use crate::support::{CHATML, Case, Silent, TAGGED, chat, document, text};

#[test]
fn the_same_rows_give_the_same_set_for_any_number_of_threads() {
    let rows: Vec<Value> =
        (0..3000).map(|n| chat(&[("user", &format!("{n}?")), ("assistant", &"y".repeat(n % 50 + 1))])).collect();
    let file = |threads: usize, name: &str| {
        let case = Case::new(&rows, CHATML).with("threads", json!(threads));
        case.made();
        std::fs::read(case.place().join(name)).unwrap()
    };
    for name in ["tokens.bin", "mask.bin", "offsets.bin", "origins.bin"] {
        assert_eq!(file(1, name), file(5, name), "{name}");
    }
}

#[test]
fn rows_are_kept_or_counted_with_their_reason() {
    let lines = [
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}"#,
        "",
        r#"{"messages": [{"role": "user", "content": "q"}"#,
        r#"{"messages": []}"#,
        r#"{"messages": [{"role": "user", "content": "q"}]}"#,
        r#"{"messages": [{"role": "asistant", "content": "q"}]}"#,
        r#"{"messages": "x"}"#,
        r#"{"messages": [{"role": "user", "content": "\ud800"}]}"#,
    ];
    let case = Case::of_bytes("rows.jsonl", lines.join("\n").as_bytes(), CHATML).with("on_error", json!("skip"));
    let (counts, store) = case.made();
    assert_eq!((&counts["read"], &counts["kept"]), (&json!(7), &json!(1)));
    assert_eq!(counts["dropped"], json!({"bad row": 4, "empty": 1, "no trained token": 1}));
    assert!(counts["dropped_examples"]["bad row"][0].as_str().unwrap().starts_with("rows.jsonl:3: not valid JSON"));
    assert_eq!(store.origin(0).1, 1);
    let failing = Case::of_bytes("rows.jsonl", lines.join("\n").as_bytes(), CHATML);
    let error = failing.run().unwrap_err();
    assert_eq!((error.kind, error.place.as_str()), (Kind::Data, "rows.jsonl:3"));
    assert!(!failing.place().exists());
    assert_eq!(std::fs::read_dir(failing.folder.path()).unwrap().count(), 1, "only the rows are left");
}

#[test]
fn formats_are_recognised_with_their_evidence() {
    let seen = |row: Value| {
        let (counts, _) = Case::new(&[row], CHATML).made();
        (
            counts["sources"][0]["format"].as_str().unwrap().to_string(),
            counts["sources"][0]["evidence"].as_str().unwrap().to_string(),
        )
    };
    let turn = |role: &str, text: &str, who: &str| json!([{role: "user", text: "q"}, {role: who, text: "a"}]);
    for (row, format, word) in [
        (json!({"messages": turn("role", "content", "assistant"), "prompt": "x"}), "messages", "\"messages\""),
        (json!({"conversations": turn("role", "content", "assistant")}), "messages", "\"conversations\""),
        (json!({"conversations": turn("from", "value", "gpt")}), "sharegpt", "{from, value}"),
        (json!({"instruction": "i", "input": "x", "output": "o"}), "alpaca", "prompt_completion"),
        (json!({"prompt": "p", "completion": "c"}), "prompt_completion", "alpaca"),
        (json!({"text": "t", "id": 7}), "text", "\"text\""),
    ] {
        let (found, evidence) = seen(row);
        assert_eq!(found, format);
        assert!(evidence.contains(word), "{evidence}");
    }
}

#[test]
fn an_unknown_row_shows_what_to_write_and_writing_it_works() {
    let rows = [json!({"question": "2+2?", "answer": "4"})];
    let error = Case::new(&rows, CHATML).run().unwrap_err();
    assert!(error.remedy.contains("prompt = \"question\", completion = \"answer\""), "{error}");
    assert!(error.remedy.contains("instruction = \"question\", output = \"answer\""));
    let with = |fields: Value| Case::new(&rows, CHATML).with_source("fields", fields);
    let (counts, store) = with(json!({"prompt": "question", "completion": "answer"})).made();
    assert_eq!(counts["sources"][0]["format"], "prompt_completion");
    assert_eq!(text(&document(&store, 0).0), "2+2?4<|endoftext|>");
    let (counts, _) = with(json!({"instruction": "question", "output": "answer"})).made();
    assert_eq!(counts["sources"][0]["format"], "alpaca");
    let rows = [json!({"id": "7", "steps": "x", "solution": "4", "problem": "2+2?"})];
    let error = Case::new(&rows, CHATML).run().unwrap_err();
    assert!(error.remedy.contains("prompt = \"problem\", completion = \"solution\""), "{error}");
    let pretty = Case::of_bytes("rows.jsonl", b"{\n \"text\": 1\n}", CHATML).run().unwrap_err();
    assert!(pretty.place == "rows.jsonl:1" && pretty.problem.contains("not valid JSON"), "{pretty}");
    let typo = with(json!({"prompt": "questoin", "completion": "answer"})).run().unwrap_err();
    assert!(typo.problem.contains("no field \"questoin\"") && typo.wanted.contains("\"question\""), "{typo}");
    let mixed = with(json!({"prompt": "question", "output": "answer"})).run().unwrap_err();
    assert!(mixed.problem.contains("no format has all of these"), "{mixed}");
}

#[test]
fn chats_without_a_template_name_the_choices() {
    let error = Case::new(&[chat(&[("user", "a"), ("assistant", "b")])], CHATML)
        .with("template", Value::Null)
        .run()
        .unwrap_err();
    assert_eq!(error.kind, Kind::Template);
    assert!(error.remedy.contains("chatml"), "{error}");
    Case::new(&[json!({"text": "no template needed"})], CHATML).with("template", Value::Null).made();
}

#[test]
fn roles_can_be_mapped() {
    let row = json!({"messages": [{"role": "pirate", "content": "q"}, {"role": "parrot", "content": "a"}]});
    let (_, store) =
        Case::new(&[row], CHATML).with_source("roles", json!({"pirate": "user", "parrot": "assistant"})).made();
    assert_eq!(crate::support::trained_text(&store, 0), ["a<|im_end|>"]);
}

#[test]
fn every_input_changes_the_key_and_nothing_else_does() {
    // BO-18
    let rows = [json!({"text": "one"}), json!({"text": "two"})];
    let case = || Case::new(&rows, CHATML);
    let key_of = |case: &Case| key::of_spec(&case.parsed()).unwrap().0;
    let base = key_of(&case());
    assert_eq!(base, key_of(&case()), "the folder and the number of threads do not matter");
    assert_eq!(base, key_of(&case().with("threads", json!(7))));
    let changed = [
        Case::new(&[rows[0].clone(), json!({"text": "twO"})], CHATML),
        Case::new(&rows, TAGGED),
        case().with("train_on", json!("last")),
        case().with("train_on", json!(["user"])),
        case().with("on_error", json!("skip")),
        case().with("control_tokens", json!("allow")),
        case().with("holdout", json!({"fraction": 0.5, "part": "train"})),
        case().with("holdout", json!({"fraction": 0.5, "part": "eval"})),
        case().with("renderer", json!("callback")),
        case().with_source("format", json!("text")),
        case().with_source("fields", json!({"text": "text"})),
        case().with_source("roles", json!({"a": "user"})),
        case().with_tokenizer("json", json!(crate::support::tokenizer_json(&[("a", "b")]))),
        case().with_tokenizer("eos_id", json!(0)),
        case().with_tokenizer("add_bos", json!(true)),
        case().with_tokenizer("bos_id", Value::Null),
        case().with_tokenizer("vocab_size", json!(301)),
        case().with_tokenizer("special", json!({})),
        Case::of_bytes("rows.txt", b"one\ntwo", CHATML),
    ];
    let keys: HashSet<String> = changed.iter().map(key_of).chain([base.clone()]).collect();
    assert_eq!(keys.len(), changed.len() + 1);
    let made = case();
    let (_, store) = made.made();
    assert_eq!(store.manifest().key, base);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_noticed() {
    let case = Case::new(&[json!({"text": "one"})], CHATML).with_source("xxh3", json!("0123456789abcdef"));
    assert!(case.run().unwrap_err().problem.contains("changed while it was read"));
}

#[test]
fn held_out_rows_and_the_others_are_the_whole() {
    let rows: Vec<Value> = (0..400).map(|n| json!({"text": format!("row {n}")})).collect();
    let part = |name: &str| {
        let case = Case::new(&rows, CHATML).with("holdout", json!({"fraction": 0.25, "part": name}));
        let (counts, store) = case.made();
        let lines: HashSet<u64> = (0..store.num_documents()).map(|index| store.origin(index).1).collect();
        (counts, lines)
    };
    let ((train_counts, train), (eval_counts, eval)) = (part("train"), part("eval"));
    assert_eq!(train_counts["dropped"]["held out"], json!(eval.len()));
    assert_eq!(eval_counts["dropped"]["not held out"], json!(train.len()));
    assert!(train.is_disjoint(&eval) && train.len() + eval.len() == 400);
    assert!((60..140).contains(&eval.len()), "{}", eval.len());
    // By content: rows added in front change no one's side.
    let more: Vec<Value> = (400..410).map(|n| json!({"text": format!("row {n}")})).chain(rows.clone()).collect();
    let case = Case::new(&more, CHATML).with("holdout", json!({"fraction": 0.25, "part": "eval"}));
    let (_, store) = case.made();
    let shifted: HashSet<u64> = (0..store.num_documents())
        .map(|index| store.origin(index).1)
        .filter(|line| *line > 10)
        .map(|line| line - 10)
        .collect();
    assert_eq!(shifted, eval);
}

/// minijinja behind the callback's interface.
struct Through(Template);

impl Renderer for Through {
    fn render(&self, conversations: Vec<String>) -> rft_core::Result<Vec<Result<Rendered, String>>> {
        let render = |text: &String| {
            let conversation: Value = serde_json::from_str(text).unwrap();
            let prompt = conversation["add_generation_prompt"].as_bool().unwrap();
            self.0.render_json(&conversation, prompt)
        };
        Ok(conversations.iter().map(render).collect())
    }
}

#[test]
fn a_callback_renders_what_the_native_one_does() {
    let rewriting = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let mut rows: Vec<Value> = (0..40)
        .map(|n| chat(&[("user", &format!("{n} <|im_end|>")), ("assistant", "a"), ("user", "b"), ("assistant", "c")]))
        .collect();
    rows.push(json!({"messages": []}));
    rows.push(chat(&[("user", "only")]));
    for template in [CHATML, TAGGED, rewriting] {
        for train_on in [json!("assistant"), json!("last"), json!("all"), json!(["user", "assistant"])] {
            if template == rewriting && train_on.is_array() {
                continue; // What comes before a user's turn is not the start of the whole there, and that is told.
            }
            let native = Case::new(&rows, template).with("train_on", train_on.clone());
            let (counts, store) = native.made();
            let called = Case::new(&rows, template).with("train_on", train_on).with("renderer", json!("callback"));
            let renderer = Through(Template::new(template, &called.parsed().tokenizer.special).unwrap());
            let again = prepare(&called.parsed(), &called.place(), Some(&renderer), &mut Silent).unwrap();
            assert_eq!(
                (&counts["kept"], &counts["dropped"], &counts["tokens"]),
                (&again["kept"], &again["dropped"], &again["tokens"])
            );
            let other = rft_core::store::Store::open(&called.place()).unwrap();
            for index in 0..store.num_documents() {
                assert_eq!(document(&store, index), document(&other, index));
            }
        }
    }
}

struct Stopping(u32);

impl Observer for Stopping {
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, _: u64) -> rft_core::Result<()> {
        assert!(bytes_read <= bytes_total);
        self.0 += 1;
        if self.0 == 2 { Err(Error::new(Kind::Argument, "test", "stop")) } else { Ok(()) }
    }
}

#[test]
fn a_stopped_preparation_leaves_nothing_behind() {
    let rows: Vec<Value> = (0..5000).map(|n| json!({"text": format!("row {n}")})).collect();
    let case = Case::new(&rows, CHATML);
    let error = prepare(&case.parsed(), &case.place(), None, &mut Stopping(0)).unwrap_err();
    assert_eq!(error.problem, "stop");
    assert_eq!(std::fs::read_dir(case.folder.path()).unwrap().count(), 1);
}

#[test]
fn an_id_the_model_has_no_row_for_is_an_error() {
    let case = Case::new(&[json!({"text": "hi"})], CHATML).with_tokenizer("vocab_size", json!(200));
    let error = case.run().unwrap_err();
    assert_eq!(error.kind, Kind::Tokenizer);
    assert!(error.problem.contains("256") && error.place.contains("rows.jsonl:1"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever users write, it is decoded as written, and only the template makes control tokens.
    #[test]
    fn text_survives_and_control_tokens_are_the_templates(
        turns in prop::collection::vec("(a|é|<|\\||>|/|s| |\n|<\\|im_end\\|>|<\\|im_start\\|>|</s>|<s>|im_|end\\|>){0,12}", 1..5),
    ) {
        let mut messages = Vec::new();
        for (index, turn) in turns.iter().enumerate() {
            messages.push((if index % 2 == 0 { "user" } else { "assistant" }, turn.as_str()));
        }
        messages.push(("assistant", "end"));
        for template in [CHATML, TAGGED] {
            let (_, store) = Case::new(&[chat(&messages)], template).made();
            let (ids, _) = document(&store, 0);
            let expected: String = messages.iter().map(|(role, content)| format!("<|im_start|>{role}\n{content}<|im_end|>\n")).collect();
            // jinja drops one line end at the very end of a template's text, not of its output.
            prop_assert_eq!(text(&ids), expected);
            let control = ids.iter().filter(|id| (256..260).contains(*id)).count();
            prop_assert_eq!(control, 2 * messages.len());
            let assistants = messages.iter().filter(|(role, _)| *role == "assistant");
            let wanted: Vec<String> = assistants.map(|(_, content)| format!("{content}<|im_end|>")).collect();
            prop_assert_eq!(crate::support::trained_text(&store, 0).concat(), wanted.concat());
        }
    }

    /// No row makes the core panic, and every row is kept or counted.
    #[test]
    fn whatever_the_rows_are_they_are_kept_or_counted(
        rows in prop::collection::vec(prop::collection::vec(prop::sample::select(PIECES), 1..14), 1..12),
        format in prop::sample::select(&["messages", "sharegpt", "alpaca", "prompt_completion", "text"][..]),
    ) {
        let lines: Vec<String> = rows.iter().map(|pieces| pieces.concat()).collect();
        let content = format!("{{\"first\": 1}}\n{}", lines.join("\n"));
        let case = Case::of_bytes("rows.jsonl", content.as_bytes(), CHATML);
        let case = case.with("on_error", json!("skip")).with_source("format", json!(format));
        match case.run() {
            Ok(counts) => {
                let dropped: u64 = counts["dropped"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
                prop_assert_eq!(counts["read"].as_u64().unwrap(), counts["kept"].as_u64().unwrap() + dropped);
                prop_assert_eq!(counts["read"].as_u64().unwrap() as usize, lines.len() + 1);
            }
            Err(error) => prop_assert!(error.problem.contains("no token to train on"), "{}", error),
        }
    }
}

/// Pieces of rows, right and wrong.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ",",
    "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"a\"}]}",
    "{\"conversations\": [{\"from\": \"human\", \"value\": \"q\"}, {\"from\": \"gpt\", \"value\": null}]}",
    "{\"instruction\": \"i\", \"output\": \"o\", \"input\": 7}",
    "{\"prompt\": [], \"completion\": []}",
    "{\"prompt\": \"p\", \"completion\": \"c\", \"loss_weight\": 0}",
    "{\"text\": \"t\"}",
    "{\"text\": \"\\ud83d\"}",
    "{\"messages\": [{\"role\": \"assistant\", \"content\": [{\"type\": \"image\"}]}]}",
    "{\"messages\": [{\"role\": \"assistant\", \"content\": \"\", \"train\": true}], \"tools\": \"x\"}",
    "{\"messages\": [7]}",
    "\u{fdd0}",
    "1e999",
    "null",
];
