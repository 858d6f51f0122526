//! Files -> a prepared set: read, render, tokenise and mask block by block, in the order of the files.
//!
//! Rows of a block are worked on in parallel by a pool of threads that lives only as long as the call; what is written
//! does not depend on their number.

use std::path::Path;

use minijinja::Value;
use rayon::prelude::*;
use serde_json::{Map, Value as Json, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::chat::{self, Job, Masked, Request};
use crate::counts::{Counts, Note};
use crate::detect;
use crate::error::{Error, Kind, Result};
use crate::example::{Content, Format, Message, Parser, Reason, RowError};
use crate::jsonl::{Block, Layout};
use crate::key;
use crate::readers::{self, Reader};
use crate::spec::{ControlPolicy, FormatChoice, OnError, RendererKind, Source, Spec};
use crate::store::{Document, SourceRecord, Writer};
use crate::template::{self, Rendered, Template, to_value};
use crate::tokenizer::Tokenizer;
use crate::tokens::{self, Tokens};

const BLOCK_ROWS: usize = 1024;
const BLOCK_BYTES: usize = 8 << 20;
/// Rows that decide a format.
const SAMPLE_ROWS: usize = 100;

/// Renders chats in place of minijinja: a block of conversations (JSON each) at a time.
pub trait Renderer: Sync {
    /// A text with its generation spans, or the sentence that says why not, for each conversation.
    fn render(&self, conversations: Vec<String>) -> Result<Vec<std::result::Result<Rendered, String>>>;
}

/// What the caller hears and may say while a set is made.
pub trait Observer {
    /// After every block. An error stops the preparation.
    fn progress(&mut self, bytes_read: u64, bytes_total: u64, rows: u64) -> Result<()>;
}

/// What rows are turned into tokens with.
struct Tools<'a> {
    spec: &'a Spec,
    tokenizer: Tokenizer,
    template: Option<Template>,
    tagged: bool,
    /// Whether contents have to be lists of parts.
    parts: bool,
    renderer: Option<&'a dyn Renderer>,
}

/// What became of a row.
enum Outcome {
    Kept(Tokens),
    Dropped(RowError),
}

/// A row between parsing and tokens.
enum Row {
    Done(Outcome),
    Chat { job: Box<Job>, spelled: bool },
}

/// Makes the set at `out` and returns the counts.
///
/// # Errors
/// The first bad row under `on_error = fail`; no trained token at all; whatever reading or writing meets.
pub fn prepare(spec: &Spec, out: &Path, renderer: Option<&dyn Renderer>, observer: &mut dyn Observer) -> Result<Json> {
    let threads = match spec.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|index| format!("rft-prepare-{index}"))
        .build()
        .map_err(|e| Error::new(Kind::Io, "prepare", format!("cannot start threads: {e}")))?;
    let tools = Tools::new(spec, renderer)?;
    let mut writer = Writer::new(out, spec.tokenizer.vocab_size)?;
    let mut counts = Counts::default();
    let total = spec.sources.iter().map(readers::size).sum();
    let (mut hashes, mut records, mut done) = (Vec::new(), Vec::new(), 0u64);
    for (index, source) in spec.sources.iter().enumerate() {
        let mut reader = Reader::open(source)?;
        let mut first = reader.next_block(BLOCK_ROWS, BLOCK_BYTES)?;
        let (parser, evidence) = choose_parser(source, &reader, first.as_ref())?;
        tools.check_template(&parser, source, &evidence)?;
        counts.begin_source(source, parser.format(), &evidence);
        while let Some(block) = match first.take() {
            Some(block) => Some(block),
            None => reader.next_block(BLOCK_ROWS, BLOCK_BYTES)?,
        } {
            let outcomes = tools.block(&pool, &parser, reader.layout(), &block)?;
            for (row, outcome) in outcomes.into_iter().enumerate() {
                let line = block.row(row).0;
                tools.record(&mut writer, &mut counts, index, line, outcome)?;
            }
            observer.progress(done + reader.bytes_read(), total, counts.read())?;
        }
        let (hash, bytes) = reader.finish()?;
        let hash = key::hex(hash);
        key::check(source, &hash)?;
        done += bytes;
        records.push(SourceRecord { path: source.place(), bytes, xxh3: hash.clone() });
        hashes.push(hash);
    }
    let key = key::of_inputs(&key::inputs(spec, &hashes));
    let report = counts.to_json(&writer, tools.tokenizer.control().is_empty());
    if writer.trained_tokens() == 0 {
        return Err(counts.nothing_trained(spec));
    }
    writer.finish(&key, records, report.clone())?;
    Ok(report)
}

/// The parser of a file, and the sentence that says why it is this one.
fn choose_parser(source: &Source, reader: &Reader, block: Option<&Block>) -> Result<(Parser, String)> {
    let (format, evidence) = match (reader.layout(), source.format) {
        (Layout::Text, FormatChoice::Auto | FormatChoice::Fixed(Format::Text)) => {
            (Format::Text, "a text file: each line is a document, all of it trained on".to_string())
        }
        (Layout::Text, FormatChoice::Fixed(format)) => {
            let problem = format!("a .txt file cannot hold rows of format {}", format.name());
            return Err(Error::new(Kind::Data, source.shown(), problem).wanted("JSON lines, or format = \"text\""));
        }
        (_, FormatChoice::Fixed(format)) => (format, "as the config says".to_string()),
        (_, FormatChoice::Auto) => {
            let Some(block) = block else {
                return Err(Error::new(Kind::Data, source.shown(), "the file holds no rows"));
            };
            let samples = block.rows().take(SAMPLE_ROWS).map(|(line, bytes)| (line, detect::sample_row(bytes)));
            let (mut rows, mut lines, mut broken): (Vec<Map<String, Json>>, Vec<u64>, _) = (vec![], vec![], None);
            for (line, sample) in samples {
                match sample {
                    Ok(row) => {
                        rows.push(row);
                        lines.push(line);
                    }
                    Err(error) => broken = broken.or(Some((line, error))),
                }
            }
            if let (Some((line, error)), []) = (broken, rows.as_slice()) {
                return Err(row_error(source, line, &error));
            }
            let line = lines.first().map_or(1, |line| *line);
            detect::detect(&rows, source).map_err(|e| row_error(source, line, &e))?
        }
    };
    let parser = Parser::new(format, source)
        .map_err(|problem| Error::new(Kind::Data, format!("{}, [fields]", source.shown()), problem))?;
    Ok((parser, evidence))
}

fn row_error(source: &Source, line: u64, error: &RowError) -> Error {
    let field = if error.field.is_empty() { String::new() } else { format!(", field \"{}\"", error.field) };
    let kind = if error.reason == Reason::TemplateError { Kind::Template } else { Kind::Data };
    Error::new(kind, format!("{}:{line}{field}", source.shown()), &error.problem)
        .wanted(error.wanted.clone())
        .remedy(error.remedy.clone())
}

impl<'a> Tools<'a> {
    fn new(spec: &'a Spec, renderer: Option<&'a dyn Renderer>) -> Result<Tools<'a>> {
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
        let mut tools = Tools { spec, tokenizer, template, tagged, parts: false, renderer };
        tools.parts = tools.needs_parts()?;
        Ok(tools)
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
    fn check_template(&self, parser: &Parser, source: &Source, evidence: &str) -> Result<()> {
        let chats = matches!(parser.format(), Format::Messages | Format::ShareGpt | Format::Alpaca);
        if !chats || self.spec.template.is_some() || self.renderer.is_some() {
            return Ok(());
        }
        let problem = format!("the rows are chats ({evidence}), but the model has no chat template");
        Err(Error::new(Kind::Template, source.shown(), problem)
            .wanted("a chat template that says how turns are written")
            .remedy("set data.template to \"chatml\", \"llama3\", \"gemma\", \"plain\" or a .jinja file"))
    }

    /// Turns a block's rows into tokens, in order.
    fn block(&self, pool: &rayon::ThreadPool, parser: &Parser, layout: Layout, block: &Block) -> Result<Vec<Outcome>> {
        let rows: Vec<(u64, &[u8])> = block.rows().collect();
        match self.renderer {
            None => Ok(pool.install(|| {
                rows.par_iter()
                    .with_min_len(4)
                    .map(|(_, bytes)| match self.begin(parser, layout, bytes) {
                        Row::Done(outcome) => outcome,
                        Row::Chat { job, spelled } => self.render_native(*job, spelled),
                    })
                    .collect()
            })),
            Some(renderer) => {
                let begun: Vec<Row> =
                    pool.install(|| rows.par_iter().map(|(_, bytes)| self.begin(parser, layout, bytes)).collect());
                self.render_by_callback(pool, renderer, begun)
            }
        }
    }

    /// Parses a row. Raw text is done at once; a chat still has to be rendered.
    fn begin(&self, parser: &Parser, layout: Layout, bytes: &[u8]) -> Row {
        if let Some(holdout) = &self.spec.holdout
            && !holdout.wants(xxh3_64(bytes.trim_ascii()))
        {
            let reason = match holdout.part {
                crate::spec::Part::Train => Reason::HeldOut,
                crate::spec::Part::Eval => Reason::NotHeldOut,
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
    fn render_by_callback(
        &self,
        pool: &rayon::ThreadPool,
        renderer: &dyn Renderer,
        rows: Vec<Row>,
    ) -> Result<Vec<Outcome>> {
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
            rows = pool.install(|| work.into_par_iter().rev().map(|(row, own)| self.advance(row, own)).collect());
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

    /// Writes a kept row, counts a dropped one, or stops.
    fn record(
        &self,
        writer: &mut Writer,
        counts: &mut Counts,
        index: usize,
        line: u64,
        outcome: Outcome,
    ) -> Result<()> {
        let source = &self.spec.sources[index];
        match outcome {
            Outcome::Kept(tokens) => {
                counts.keep(&tokens);
                writer
                    .push(&Document {
                        ids: &tokens.ids,
                        trained: &tokens.trained,
                        weights: tokens.weights.as_deref(),
                        source: index as u32,
                        line,
                    })
                    .map_err(|mut e| {
                        if e.place.is_empty() || e.kind == Kind::Tokenizer {
                            e.place = format!("{}:{line}", source.shown());
                        }
                        e
                    })
            }
            Outcome::Dropped(error) if error.reason.is_error() && self.spec.on_error == OnError::Fail => {
                Err(row_error(source, line, &error))
            }
            Outcome::Dropped(error) => {
                counts.drop_row(
                    &error,
                    Note { place: format!("{}:{line}", source.shown()), text: error.problem.clone() },
                );
                Ok(())
            }
        }
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
        Ok(tokens) => Outcome::Kept(tokens),
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
