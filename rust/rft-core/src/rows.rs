//! One row's bytes -> documents of token ids with trained bits: parse, render, mask, tokenise.
//!
//! [`Rows`] holds what all rows share and is used by all threads at once; what a row becomes depends on the row alone.

use minijinja::Value;
use serde_json::{Value as Json, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::chat::{self, Job, Masked, Request};
use crate::error::{Error, Kind, Result};
use crate::example::{Content, Format, Message, Parser, Reason, RowError};
use crate::jsonl::Layout;
use crate::spec::{ControlPolicy, Part, RendererKind, Source, Spec};
use crate::template::{self, Rendered, Template, to_value};
use crate::tokenizer::Tokenizer;
use crate::tokens::{self, Tokens};

/// Renders chats in place of minijinja: a block of conversations (JSON each) at a time.
pub trait Renderer: Sync {
    /// A text with its generation spans, or the sentence that says why not, for each conversation.
    fn render(&self, conversations: Vec<String>) -> Result<Vec<std::result::Result<Rendered, String>>>;
}

/// What rows are turned into tokens with.
pub struct Rows<'a> {
    spec: &'a Spec,
    tokenizer: Tokenizer,
    template: Option<Template>,
    tagged: bool,
    /// Whether contents have to be lists of parts.
    parts: bool,
    renderer: Option<&'a dyn Renderer>,
}

/// What became of a row.
pub enum Outcome {
    /// Its documents, in order: one, or more where each turn of a chat becomes a row of its own.
    Kept(Vec<Tokens>),
    /// Why it is left out.
    Dropped(RowError),
}

/// Buffers that one thread keeps from row to row.
#[derive(Default)]
pub struct Scratch {}

/// A row between parsing and tokens.
enum Row {
    Done(Outcome),
    Chat { job: Box<Job>, spelled: bool },
}

impl<'a> Rows<'a> {
    /// Loads tokenizer and template, and tells how the template wants contents.
    pub fn new(spec: &'a Spec, renderer: Option<&'a dyn Renderer>) -> Result<Rows<'a>> {
        let renderer = match spec.renderer {
            RendererKind::Native => None,
            RendererKind::Callback => Some(renderer.ok_or_else(|| {
                Error::new(Kind::Argument, "prepare", "the renderer is \"callback\", but no function was given")
            })?),
        };
        let template = match (&spec.template, renderer) {
            (Some(source), None) => Some(Template::new(source, &spec.tokenizer.special)?),
            _ => None,
        };
        let tagged = spec.template.as_deref().is_some_and(template::has_tags);
        let tokenizer = Tokenizer::new(&spec.tokenizer.json)?;
        let mut rows = Rows { spec, tokenizer, template, tagged, parts: false, renderer };
        rows.parts = rows.needs_parts()?;
        Ok(rows)
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether the template writes a content only where it is a list of parts, as those for images and text do.
    fn needs_parts(&self) -> Result<bool> {
        const PROBE: &str = "A probe of this template";
        let chat = |content: Json| json!({"messages": [{"role": "user", "content": content}]});
        let probes = [chat(json!(PROBE)), chat(json!([{"type": "text", "text": PROBE}]))];
        let renders = match (&self.template, self.renderer) {
            (_, Some(renderer)) => renderer.render(probes.iter().map(with_prompt).collect())?,
            (Some(template), None) => probes.iter().map(|probe| template.render_json(probe, false)).collect(),
            (None, None) => return Ok(false),
        };
        let shown: Vec<bool> = renders
            .into_iter()
            .map(|render| render.is_ok_and(|render| render.text.contains(PROBE) && !render.text.contains("'text'")))
            .collect();
        Ok(shown == [false, true])
    }

    /// Chats need a template.
    pub fn check_template(&self, parser: &Parser, source: &Source, evidence: &str) -> Result<()> {
        let chats = matches!(parser.format(), Format::Messages | Format::ShareGpt | Format::Alpaca);
        if !chats || self.spec.template.is_some() || self.renderer.is_some() {
            return Ok(());
        }
        let problem = format!("the rows are chats ({evidence}), but the model has no chat template");
        Err(Error::new(Kind::Template, source.shown(), problem)
            .wanted("a chat template that says how turns are written")
            .remedy("set data.template to \"chatml\", \"llama3\", \"gemma\", \"plain\" or a .jinja file"))
    }

    /// Turns rows into tokens, in order. With a renderer of the caller, chats of all rows are rendered together.
    pub fn block(
        &self,
        parser: &Parser,
        layout: Layout,
        rows: &[&[u8]],
        scratch: &mut Scratch,
    ) -> Result<Vec<Outcome>> {
        match self.renderer {
            None => Ok(rows.iter().map(|bytes| self.row(parser, layout, bytes, scratch)).collect()),
            Some(renderer) => {
                let begun = rows.iter().map(|bytes| self.begin(parser, layout, bytes)).collect();
                self.render_by_callback(renderer, begun)
            }
        }
    }

    /// One row, where no renderer of the caller is asked.
    pub fn row(&self, parser: &Parser, layout: Layout, bytes: &[u8], _scratch: &mut Scratch) -> Outcome {
        match self.begin(parser, layout, bytes) {
            Row::Done(outcome) => outcome,
            Row::Chat { job, spelled } => self.render_native(*job, spelled),
        }
    }

    /// Parses a row. Raw text is done at once; a chat still has to be rendered.
    fn begin(&self, parser: &Parser, layout: Layout, bytes: &[u8]) -> Row {
        if let Some(holdout) = &self.spec.holdout
            && !holdout.wants(xxh3_64(bytes.trim_ascii()))
        {
            let reason = match holdout.part {
                Part::Train => Reason::HeldOut,
                Part::Eval => Reason::NotHeldOut,
            };
            return Row::Done(Outcome::Dropped(RowError::new(reason, "", "")));
        }
        let example = match parser.parse(bytes, layout) {
            Ok(example) => example,
            Err(error) => return Row::Done(Outcome::Dropped(error)),
        };
        let done = |result: std::result::Result<Tokens, RowError>| Row::Done(outcome(result));
        match example.content {
            Content::Text(text) => done(self.raw(&text, None, example.weight)),
            Content::Pair(prompt, completion) => done(self.raw(&completion, Some(&prompt), example.weight)),
            Content::Chat(mut chat) => {
                if chat.messages.is_empty() {
                    return done(Err(RowError::new(Reason::Empty, "messages", "no messages")));
                }
                if self.parts {
                    chat.messages.iter_mut().for_each(as_parts);
                }
                let control = match self.spec.control_tokens {
                    ControlPolicy::Text => Some(self.tokenizer.control()),
                    ControlPolicy::Allow => None,
                };
                let spelled = match chat::neutralise(&mut chat, control) {
                    Ok(spelled) => spelled,
                    Err(error) => return done(Err(error)),
                };
                let job = Job::new(chat, example.weight, &self.spec.train_on, self.tagged);
                if !job.wants_any() {
                    return done(Err(tokens::untrained("no message of it is trained on")));
                }
                Row::Chat { job: Box::new(job), spelled }
            }
        }
    }

    fn raw(&self, text: &str, prompt: Option<&str>, weight: f32) -> std::result::Result<Tokens, RowError> {
        tokens::of_raw(&self.tokenizer, self.spec, prompt, text, weight)
    }

    fn render_native(&self, mut job: Job, spelled: bool) -> Outcome {
        let chat = Values::new(&job);
        loop {
            let renders = job.pending().iter().map(|request| self.render_one(&job, &chat, request)).collect();
            match job.answer(renders, self.tokenizer.control(), &self.spec.train_on) {
                Ok(None) => {}
                Ok(Some(masked)) => return self.finish(&masked, spelled),
                Err(error) => return Outcome::Dropped(error),
            }
        }
    }

    fn render_one(&self, job: &Job, chat: &Values, request: &Request) -> std::result::Result<Rendered, String> {
        let template = self.template.as_ref().ok_or("there is no chat template")?;
        let messages = match request.marked {
            None => chat.messages[..request.messages].to_vec(),
            Some(_) => job.messages(request).into_iter().map(|fields| to_value(&Json::Object(fields))).collect(),
        };
        template.render(messages, &chat.extra, request.prompt)
    }

    /// Rounds of one call for all chats of the block, until every chat knows its spans.
    fn render_by_callback(&self, renderer: &dyn Renderer, rows: Vec<Row>) -> Result<Vec<Outcome>> {
        let mut rows = rows;
        loop {
            let conversations: Vec<String> = rows.iter().flat_map(conversations_of).collect();
            if conversations.is_empty() {
                break;
            }
            let asked = conversations.len();
            let mut answers = renderer.render(conversations)?;
            if answers.len() != asked {
                let problem = format!("the renderer gave {} texts for {asked} conversations", answers.len());
                return Err(Error::new(Kind::Argument, "prepare", problem));
            }
            let mut work: Vec<(Row, Vec<_>)> = Vec::with_capacity(rows.len());
            for row in rows.into_iter().rev() {
                let count = if let Row::Chat { job, .. } = &row { job.pending().len() } else { 0 };
                let own = answers.split_off(answers.len() - count);
                work.push((row, own));
            }
            rows = work.into_iter().rev().map(|(row, own)| self.advance(row, own)).collect();
        }
        let done = |row| match row {
            Row::Done(outcome) => outcome,
            Row::Chat { .. } => Outcome::Dropped(RowError::new(Reason::TemplateError, "", "the chat was not rendered")),
        };
        Ok(rows.into_iter().map(done).collect())
    }

    fn advance(&self, row: Row, answers: Vec<std::result::Result<Rendered, String>>) -> Row {
        match row {
            Row::Done(outcome) => Row::Done(outcome),
            Row::Chat { mut job, spelled } => {
                match job.answer(answers, self.tokenizer.control(), &self.spec.train_on) {
                    Ok(None) => Row::Chat { job, spelled },
                    Ok(Some(masked)) => Row::Done(self.finish(&masked, spelled)),
                    Err(error) => Row::Done(Outcome::Dropped(error)),
                }
            }
        }
    }

    fn finish(&self, masked: &Masked, spelled: bool) -> Outcome {
        let tokens = tokens::of_chat(&self.tokenizer, masked);
        outcome(tokens.map(|tokens| Tokens { spelled, ..tokens }))
    }
}

/// A chat as the template's values, made once for all its renders (clones are cheap).
struct Values {
    messages: Vec<Value>,
    extra: Vec<(String, Value)>,
}

impl Values {
    fn new(job: &Job) -> Values {
        let message = |message: &Message| {
            Value::from_pairs(message.fields.iter().map(|(name, value)| (name.as_str(), to_value(value))))
        };
        Values {
            messages: job.chat().messages.iter().map(message).collect(),
            extra: job.chat().extra.iter().map(|(name, value)| (name.clone(), to_value(value))).collect(),
        }
    }
}

fn outcome(result: std::result::Result<Tokens, RowError>) -> Outcome {
    match result {
        Ok(tokens) => Outcome::Kept(vec![tokens]),
        Err(error) => Outcome::Dropped(error),
    }
}

/// A text content as a list of one part.
fn as_parts(message: &mut Message) {
    if let Some(content @ Json::String(_)) = message.fields.get_mut("content") {
        *content = json!([{"type": "text", "text": content.take()}]);
    }
}

fn with_prompt(conversation: &Json) -> String {
    let mut conversation = conversation.clone();
    conversation["add_generation_prompt"] = json!(false);
    conversation.to_string()
}

/// What a renderer of the caller is asked: the conversation as JSON, with `add_generation_prompt` in it.
fn conversations_of(row: &Row) -> Vec<String> {
    let Row::Chat { job, .. } = row else { return Vec::new() };
    let ask = |request: &Request| {
        let mut fields = job.chat().extra.clone();
        fields.insert("messages".into(), job.messages(request).into_iter().map(Json::Object).collect());
        fields.insert("add_generation_prompt".into(), json!(request.prompt));
        Json::Object(fields).to_string()
    };
    job.pending().iter().map(ask).collect()
}
