//! One row's bytes -> documents of token ids with trained bits: parse, render, mask, tokenise.
//!
//! [`Rows`] holds what all rows share and is used by all threads at once; what a row becomes depends on the row alone.

use minijinja::Value;
use serde_json::{Value as Json, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::chat::{self, Filled, Job, Masked, Request, Shapes, Wanted};
use crate::error::{Error, Kind, Result};
use crate::example::{self, Chat, Content, Message, Parser, ROLES};
use crate::format::Format;
use crate::jsonl::{Block, Layout};
use crate::lean::Lean;
use crate::readers::Reader;
use crate::row_error::{Reason, RowError};
use crate::said::{self, Said};
use crate::spec::{ControlPolicy, EndOfTurn, FormatChoice, Part, RendererKind, Source, Spec};
use crate::template::{self, Rendered, Template, to_value};
use crate::tokenizer::Tokenizer;
use crate::tokens::{self, Facts, Tokens};

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
    wanted: Wanted,
    /// Whether contents have to be lists of parts.
    parts: bool,
    renderer: Option<&'a dyn Renderer>,
    /// Where the template is one that can be filled in.
    shapes: Option<Shapes>,
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
pub struct Scratch {
    lean: Lean,
    filled: Filled,
    /// Who says what in it.
    said: Vec<Said>,
    tokens: tokens::Buffers,
}

/// A row between parsing and tokens.
enum Row {
    Done(Outcome),
    Chat { job: Box<Job>, spelled: bool, facts: Facts },
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
        let wanted =
            Wanted { train_on: spec.train_on.clone(), thinking: spec.thinking, end_of_turn: spec.end_of_turn, tagged };
        let tokenizer = Tokenizer::load(&spec.tokenizer.json, spec.tokenizer.unicode, spec.num_threads())?;
        let mut rows = Rows { spec, tokenizer, template, wanted, parts: false, renderer, shapes: None };
        rows.parts = rows.needs_parts()?;
        if let (Some(source), None) = (&spec.template, renderer) {
            let looks = template::looks(source, rows.parts);
            rows.shapes = looks.and_then(|looks| Shapes::new(looks, rows.tokenizer.control()));
        }
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
                let buffers = &mut scratch.tokens;
                let begin = |bytes: &&[u8]| match self.elsewhere(bytes) {
                    Some(elsewhere) => Row::Done(elsewhere),
                    None => self.begin(parser, layout, bytes, buffers),
                };
                let begun = rows.iter().map(begin).collect();
                self.render_by_callback(renderer, begun, &mut scratch.tokens)
            }
        }
    }

    /// One row, where no renderer of the caller is asked.
    pub fn row(&self, parser: &Parser, layout: Layout, bytes: &[u8], scratch: &mut Scratch) -> Outcome {
        if let Some(elsewhere) = self.elsewhere(bytes) {
            return elsewhere;
        }
        if let Some((method, facts)) = self.fill_lean(parser, layout, bytes, scratch) {
            return outcome(self.of_filled(scratch, method, facts));
        }
        match self.begin(parser, layout, bytes, &mut scratch.tokens) {
            Row::Done(outcome) => outcome,
            Row::Chat { job, spelled, facts } => {
                if let Some(method) = self.fill_job(&job, spelled, scratch) {
                    return outcome(self.of_filled(scratch, method, facts));
                }
                match self.render_native(*job) {
                    Ok((chat, masked)) => self.finish(&chat, &masked, spelled, facts, &mut scratch.tokens),
                    Err(error) => Outcome::Dropped(error),
                }
            }
        }
    }

    fn of_filled(
        &self,
        scratch: &mut Scratch,
        method: chat::Method,
        facts: Facts,
    ) -> std::result::Result<Tokens, RowError> {
        let Scratch { filled, said, tokens: buffers, .. } = scratch;
        tokens::of_filled(&self.tokenizer, filled, said, method, buffers).map(|tokens| {
            let facts = Facts { unended: tokens.facts.unended && self.teaches_ends(), ..facts };
            Tokens { facts, ..tokens }
        })
    }

    /// Whether the token that ends a turn is to be trained on.
    fn teaches_ends(&self) -> bool {
        self.wanted.end_of_turn != EndOfTurn::Mask
    }

    /// Fills in a row that is a plain chat, if it is one.
    fn fill_lean(
        &self,
        parser: &Parser,
        layout: Layout,
        bytes: &[u8],
        scratch: &mut Scratch,
    ) -> Option<(chat::Method, Facts)> {
        let (shapes, names) = (self.shapes.as_ref()?, parser.lean()?);
        if layout == Layout::Text {
            return None;
        }
        let text = std::str::from_utf8(bytes).ok()?;
        let Scratch { lean, filled, said, .. } = scratch;
        if !lean.read(text, names) {
            return None;
        }
        let shape = shapes.of(&lean.roles, |contents| self.made_up(&lean.roles, contents))?;
        let content = |index: usize| lean.content(index, text);
        if !shapes.fits(&shape, lean.roles.len(), content) {
            return None;
        }
        shape.fill(content, filled);
        said::contents(&filled.text, &lean.roles, content, said);
        let roles = lean.roles.iter().fold(0, |bits, role| bits | 1 << role);
        Some((shape.method, Facts { roles, unused: lean.unused_names.clone(), ..Facts::default() }))
    }

    /// Fills in a chat that is plain.
    fn fill_job(&self, job: &Job, spelled: bool, scratch: &mut Scratch) -> Option<chat::Method> {
        let shapes = self.shapes.as_ref()?;
        let (roles, contents) = job.plain()?;
        if spelled {
            return None;
        }
        let shape = shapes.of(&roles, |contents| self.made_up(&roles, contents))?;
        if !shapes.fits(&shape, roles.len(), |index| contents[index]) {
            return None;
        }
        shape.fill(|index| contents[index], &mut scratch.filled);
        said::contents(&scratch.filled.text, &roles, |index| contents[index], &mut scratch.said);
        Some(shape.method)
    }

    /// Text and spans of a chat with these roles and contents, by renders.
    fn made_up(&self, roles: &[u8], contents: &[String]) -> Option<Masked> {
        let messages = roles.iter().zip(contents);
        let messages =
            messages.map(|(role, content)| example::plain_message(ROLES[usize::from(*role)], content)).collect();
        let mut chat = Chat { messages, extra: serde_json::Map::new() };
        if self.parts {
            chat.messages.iter_mut().for_each(as_parts);
        }
        let job = Job::new(chat, 1.0, &self.wanted);
        if !job.wants_any() {
            return None;
        }
        let (_, mut masked) = self.render_native(job).ok()?;
        if masked.len() == 1 { masked.pop() } else { None }
    }

    /// Whether chats of the same roles are filled in after the first.
    pub fn fills(&self) -> bool {
        self.shapes.is_some()
    }

    /// Every chat is rendered for itself: slower, and the truth that filling in is held against.
    pub fn one_by_one(mut self) -> Rows<'a> {
        self.shapes = None;
        self
    }

    /// Hands text and spans of a row's chat to `see`, and makes no tokens of it; else says why the row is left out.
    fn measure(
        &self,
        parser: &Parser,
        layout: Layout,
        bytes: &[u8],
        scratch: &mut Scratch,
        see: &mut dyn FnMut(&str, &[chat::Span]),
    ) -> std::result::Result<(), String> {
        if self.fill_lean(parser, layout, bytes, scratch).is_some() {
            see(&scratch.filled.text, &scratch.filled.spans);
            return Ok(());
        }
        let (job, spelled) = match self.begin(parser, layout, bytes, &mut scratch.tokens) {
            Row::Chat { job, spelled, .. } => (job, spelled),
            Row::Done(Outcome::Dropped(error)) => return Err(error.problem),
            Row::Done(Outcome::Kept(_)) => return Err("it is no chat".into()),
        };
        if self.fill_job(&job, spelled, scratch).is_some() {
            see(&scratch.filled.text, &scratch.filled.spans);
            return Ok(());
        }
        let (_, masked) = self.render_native(*job).map_err(|error| error.problem)?;
        masked.iter().for_each(|part| see(&part.text, &part.spans));
        Ok(())
    }

    /// Whether a row belongs to the other side of a split.
    fn elsewhere(&self, bytes: &[u8]) -> Option<Outcome> {
        let holdout = self.spec.holdout.as_ref()?;
        if holdout.wants(xxh3_64(bytes.trim_ascii())) {
            return None;
        }
        let reason = match holdout.part {
            Part::Train => Reason::HeldOut,
            Part::Eval => Reason::NotHeldOut,
        };
        Some(Outcome::Dropped(RowError::new(reason, "", "")))
    }

    /// Parses a row. Raw text is done at once; a chat still has to be rendered.
    fn begin(&self, parser: &Parser, layout: Layout, bytes: &[u8], buffers: &mut tokens::Buffers) -> Row {
        let example = match parser.parse(bytes, layout) {
            Ok(example) => example,
            Err(error) => return Row::Done(Outcome::Dropped(error)),
        };
        let done = |result: std::result::Result<Tokens, RowError>| Row::Done(outcome(result));
        let mut facts = Facts { unused: example.unused.into(), ..Facts::default() };
        match example.content {
            Content::Text(text) => {
                let tokens = self.raw(&text, None, example.weight, buffers);
                done(tokens.map(|tokens| Tokens { facts, ..tokens }))
            }
            Content::Segments(segments) => {
                let tokens = tokens::of_segments(&self.tokenizer, self.spec, &segments, example.weight, buffers);
                done(tokens.map(|tokens| Tokens { facts, ..tokens }))
            }
            Content::Tokens(ids, trained) => {
                let most = self.spec.tokenizer.vocab_size;
                if let Some(id) = ids.iter().find(|id| **id >= most) {
                    let problem = format!("it holds the id {id}, and the model has {most}");
                    return done(Err(RowError::bad("input_ids", problem, format!("ids from 0 to {}", most - 1))
                        .remedy("make the ids with the model's own tokenizer, or skip bad rows with data.on_error = \"skip\"")));
                }
                let tokens = tokens::of_ids(ids, trained, example.weight);
                done(tokens.map(|tokens| Tokens { facts, ..tokens }))
            }
            Content::Pair(prompt, completion) => {
                let tokens = self.raw(&completion, Some(&prompt), example.weight, buffers);
                done(tokens.map(|tokens| Tokens { facts, ..tokens }))
            }
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
                let job = Job::new(chat, example.weight, &self.wanted);
                if !job.wants_any() {
                    return done(Err(tokens::untrained("no message of it is trained on")));
                }
                if job.says_nothing() {
                    return done(Err(RowError::new(Reason::Empty, "messages", "nothing to learn")));
                }
                facts.roles = job.roles();
                Row::Chat { job: Box::new(job), spelled, facts }
            }
        }
    }

    fn raw(
        &self,
        text: &str,
        prompt: Option<&str>,
        weight: f32,
        buffers: &mut tokens::Buffers,
    ) -> std::result::Result<Tokens, RowError> {
        tokens::of_raw(&self.tokenizer, self.spec, prompt, text, weight, buffers)
    }

    fn render_native(&self, mut job: Job) -> std::result::Result<(Chat, Vec<Masked>), RowError> {
        let chat = Values::new(&job);
        loop {
            let renders = job.pending().iter().map(|request| self.render_one(&job, &chat, request)).collect();
            if let Some(masked) = job.answer(renders, self.tokenizer.control())? {
                return Ok((job.into_chat(), masked));
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
        renderer: &dyn Renderer,
        rows: Vec<Row>,
        buffers: &mut tokens::Buffers,
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
            rows = work.into_iter().rev().map(|(row, own)| self.advance(row, own, buffers)).collect();
        }
        let done = |row| match row {
            Row::Done(outcome) => outcome,
            Row::Chat { .. } => Outcome::Dropped(RowError::new(Reason::TemplateError, "", "the chat was not rendered")),
        };
        Ok(rows.into_iter().map(done).collect())
    }

    fn advance(
        &self,
        row: Row,
        answers: Vec<std::result::Result<Rendered, String>>,
        buffers: &mut tokens::Buffers,
    ) -> Row {
        match row {
            Row::Done(outcome) => Row::Done(outcome),
            Row::Chat { mut job, spelled, facts } => match job.answer(answers, self.tokenizer.control()) {
                Ok(None) => Row::Chat { job, spelled, facts },
                Ok(Some(masked)) => Row::Done(self.finish(job.chat(), &masked, spelled, facts, buffers)),
                Err(error) => Row::Done(Outcome::Dropped(error)),
            },
        }
    }

    fn finish(
        &self,
        chat: &Chat,
        masked: &[Masked],
        spelled: bool,
        facts: Facts,
        buffers: &mut tokens::Buffers,
    ) -> Outcome {
        let mut documents = Vec::with_capacity(masked.len());
        for part in masked {
            match tokens::of_chat(&self.tokenizer, part, &said::in_chat(&part.text, chat), buffers) {
                Ok(tokens) => documents.push(Tokens { spelled, ..tokens }),
                Err(error) => return Outcome::Dropped(error),
            }
        }
        if let Some(first) = documents.first_mut() {
            let Facts { tools_ignored, unended, .. } = first.facts;
            first.facts = Facts { tools_ignored, unended: unended && self.teaches_ends(), ..facts };
        }
        Outcome::Kept(documents)
    }
}

/// Text and trained spans of each document of a row, or why it is left out.
pub type Shown = std::result::Result<Vec<(String, Vec<(usize, usize)>)>, String>;

/// What the chats of the first source become, without tokens. `fill`: as in a preparation; else each is rendered for itself.
pub fn masked(spec: &Spec, fill: bool) -> Result<Vec<Shown>> {
    let rows = Rows::new(spec, None)?;
    let rows = if fill { rows } else { rows.one_by_one() };
    let (parser, layout, block) = whole_file(&spec.sources[0])?;
    let mut scratch = Scratch::default();
    let shown = |bytes: &[u8]| {
        let mut documents = Vec::new();
        rows.measure(&parser, layout, bytes, &mut scratch, &mut |text, spans| {
            documents.push((text.to_string(), spans.iter().map(|span| (span.start, span.end)).collect()));
        })
        .map(|()| documents)
    };
    Ok(block.rows().map(|(_, bytes)| bytes).map(shown).collect())
}

fn whole_file(source: &Source) -> Result<(Parser, Layout, Block)> {
    let mut reader = Reader::open(source)?;
    let Some(block) = reader.next_block(usize::MAX, usize::MAX)? else {
        return Err(Error::new(Kind::Data, source.shown(), "the file holds no rows"));
    };
    let FormatChoice::Fixed(format) = source.format else {
        return Err(Error::new(Kind::Argument, source.shown(), "the format has to be named"));
    };
    let parser = Parser::new(format, source).map_err(|problem| Error::new(Kind::Data, source.shown(), problem))?;
    Ok((parser, reader.layout(), block))
}

/// What [`measure`] found.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Rows read.
    pub rows: usize,
    /// Rows that became chats.
    pub chats: usize,
    /// Bytes of text, and of trained text.
    pub bytes: (usize, usize),
    /// xxh3-64 of all texts and spans.
    pub digest: u64,
    /// CPU seconds of each time.
    pub seconds: Vec<f64>,
}

/// Sends the rows of the first source through parsing, rendering and masking, and no further, on this thread, `repeats`
/// times. `fill`: as in a preparation; else every chat is rendered for itself.
pub fn measure(spec: &Spec, repeats: usize, fill: bool) -> Result<Measured> {
    let rows = Rows::new(spec, None)?;
    let rows = if fill { rows } else { rows.one_by_one() };
    let (parser, layout, block) = whole_file(&spec.sources[0])?;
    let mut scratch = Scratch::default();
    let mut measured = Measured { rows: block.len(), ..Measured::default() };
    for _ in 0..repeats {
        let began = cpu_seconds();
        (measured.chats, measured.bytes) = (0, (0, 0));
        for (_, bytes) in block.rows() {
            let found = rows.measure(&parser, layout, bytes, &mut scratch, &mut |text, spans| {
                measured.bytes.0 += text.len();
                measured.bytes.1 += spans.iter().map(|span| span.end - span.start).sum::<usize>();
            });
            measured.chats += usize::from(found.is_ok());
        }
        measured.seconds.push(cpu_seconds() - began);
    }
    let mut hash = Xxh3::new();
    for (_, bytes) in block.rows() {
        let kept = rows.measure(&parser, layout, bytes, &mut scratch, &mut |text, spans| {
            hash.update(text.as_bytes());
            spans
                .iter()
                .for_each(|span| hash.update(format!("{},{},{};", span.start, span.end, span.weight).as_bytes()));
        });
        hash.update(&[u8::from(kept.is_ok())]);
    }
    measured.digest = hash.digest();
    Ok(measured)
}

/// CPU time of this thread.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the struct we own.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
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
