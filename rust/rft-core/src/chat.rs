//! A conversation -> rendered text and the spans of it that are trained on, by structure alone.
//!
//! The spans come from the template's generation tags, or from renders of growing parts of the chat: what the model
//! reads before message i is the render of the messages before it with the generation prompt, and that must be a prefix
//! of the whole, checked for each chat. No text is searched for what a message says.

use std::collections::HashMap;

use serde_json::{Map, Value as Json};

use crate::example::{Chat, Message, Reason, RowError};
use crate::spec::TrainOn;
use crate::template::{CONTENT_END, MARK, Rendered, SPAN_END, SPAN_START};
use crate::tokenizer::ControlTokens;

/// One render that a chat needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Messages from the first on.
    pub messages: usize,
    /// Whether the generation prompt is asked for.
    pub prompt: bool,
    /// The message whose content gets a mark at its end.
    pub marked: Option<usize>,
}

impl Request {
    fn part(messages: usize) -> Request {
        Request { messages, prompt: false, marked: None }
    }
}

/// A trained part of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// Behind the last byte.
    pub end: usize,
    /// Factor of the loss.
    pub weight: f32,
}

/// How the spans were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Everything is trained on.
    Whole,
    /// The template's generation tags.
    Tags,
    /// Renders of growing prefixes.
    Prefixes,
}

impl Method {
    /// The words in counts.
    pub fn name(self) -> &'static str {
        match self {
            Method::Whole => "everything",
            Method::Tags => "generation tags",
            Method::Prefixes => "prefix renders",
        }
    }
}

/// What a chat became.
#[derive(Clone, Debug, PartialEq)]
pub struct Masked {
    /// The text, marks of neutralised control tokens in it.
    pub text: String,
    /// What is trained on, in order, without overlap.
    pub spans: Vec<Span>,
    /// How it was found.
    pub method: Method,
}

type RowResult<T> = std::result::Result<T, RowError>;

/// A chat on its way: asks for renders until it knows its spans.
pub struct Job {
    chat: Chat,
    selected: Vec<bool>,
    weights: Vec<f32>,
    method: Method,
    pending: Vec<Request>,
    renders: HashMap<Request, Rendered>,
}

impl Job {
    /// `weight` is the row's own; `tagged` says whether the template has generation tags.
    pub fn new(chat: Chat, weight: f32, train_on: &TrainOn, tagged: bool) -> Job {
        let weights: Vec<f32> = chat.messages.iter().map(|message| message.weight * weight).collect();
        let last = chat.messages.iter().rposition(|message| message.role == "assistant");
        let selected: Vec<bool> = chat
            .messages
            .iter()
            .enumerate()
            .map(|(index, message)| {
                let chosen = match train_on {
                    TrainOn::Assistant => message.role == "assistant",
                    TrainOn::Last => Some(index) == last,
                    TrainOn::All => true,
                    TrainOn::Roles(roles) => roles.contains(&message.role),
                };
                message.train.unwrap_or(chosen) && weights[index] > 0.0
            })
            .collect();
        let method = if *train_on == TrainOn::All && selected.iter().all(|chosen| *chosen) && uniform(&weights) {
            Method::Whole
        } else if tagged && *train_on != TrainOn::All {
            Method::Tags
        } else {
            Method::Prefixes
        };
        let mut job = Job { chat, selected, weights, method, pending: Vec::new(), renders: HashMap::new() };
        job.ask_first(*train_on == TrainOn::All);
        job
    }

    /// Whether any message is to be trained on.
    pub fn wants_any(&self) -> bool {
        self.selected.iter().any(|chosen| *chosen)
    }

    /// The conversation.
    pub fn chat(&self) -> &Chat {
        &self.chat
    }

    /// What has to be rendered next; nothing when the spans can be told.
    pub fn pending(&self) -> &[Request] {
        &self.pending
    }

    fn whole(&self) -> Request {
        Request::part(self.chat.messages.len())
    }

    fn ask(&mut self, request: Request) {
        if !self.renders.contains_key(&request) && !self.pending.contains(&request) {
            self.pending.push(request);
        }
    }

    fn ask_first(&mut self, all: bool) {
        self.ask(self.whole());
        for index in 0..self.chat.messages.len() {
            if !self.selected[index] {
                continue;
            }
            let assistant = self.chat.messages[index].role == "assistant" && !all;
            match self.method {
                Method::Whole => {}
                Method::Tags if assistant => {}
                Method::Tags | Method::Prefixes => {
                    self.ask(self.before(index, all));
                    self.ask(Request::part(index + 1));
                }
            }
        }
    }

    /// What the model reads before a message: with the generation prompt where the message is generated.
    fn before(&self, index: usize, all: bool) -> Request {
        let prompt = self.chat.messages[index].role == "assistant" && !all;
        Request { messages: index, prompt, marked: None }
    }

    /// Takes the renders of [`Job::pending`], in order. The job may then ask for more.
    pub fn answer(
        &mut self,
        renders: Vec<std::result::Result<Rendered, String>>,
        control: &ControlTokens,
        train_on: &TrainOn,
    ) -> RowResult<Option<Masked>> {
        for (request, render) in std::mem::take(&mut self.pending).into_iter().zip(renders) {
            match render {
                Ok(render) => {
                    self.renders.insert(request, render);
                }
                Err(problem) => return Err(self.refused(request, &problem)),
            }
        }
        let text = self.whole_render()?.text.clone();
        let spans = match self.method {
            Method::Whole => {
                vec![Span { start: 0, end: text.len(), weight: self.weights.first().copied().unwrap_or(1.0) }]
            }
            Method::Tags => match self.tag_spans()? {
                Some(mut spans) => {
                    spans.extend(self.region_spans(&text, control, false)?.unwrap_or_default());
                    spans
                }
                None => return Ok(None),
            },
            Method::Prefixes => match self.region_spans(&text, control, *train_on == TrainOn::All)? {
                Some(spans) => spans,
                None => return Ok(None),
            },
        };
        Ok(Some(Masked { text, spans: in_order(spans), method: self.method }))
    }

    fn refused(&self, request: Request, problem: &str) -> RowError {
        let roles: Vec<&str> = self.chat.messages.iter().map(|message| message.role.as_str()).collect();
        let roles = roles.join(", ");
        let problem = if request.messages == self.chat.messages.len() {
            format!("the chat template refuses the chat (roles {roles}): {problem}")
        } else {
            format!(
                "the chat template refuses the chat's first {} messages alone (roles {roles}): {problem}",
                request.messages
            )
        };
        RowError::new(Reason::TemplateError, "", problem)
            .remedy("fix the row, use another data.template, or skip such rows with data.on_error = \"skip\"")
    }

    fn whole_render(&self) -> RowResult<&Rendered> {
        self.renders
            .get(&self.whole())
            .ok_or_else(|| RowError::new(Reason::TemplateError, "", "the chat was not rendered"))
    }

    fn assistants(&self) -> Vec<usize> {
        (0..self.chat.messages.len()).filter(|index| self.chat.messages[*index].role == "assistant").collect()
    }

    /// Spans of the generation tags that belong to chosen messages; none while more renders are needed.
    fn tag_spans(&mut self) -> RowResult<Option<Vec<Span>>> {
        let found = self.whole_render()?.spans.clone();
        let assistants = self.assistants();
        let span = |(start, end): (usize, usize), weight: f32| Span { start, end, weight };
        let weights: Vec<f32> = assistants.iter().map(|index| self.weights[*index]).collect();
        if assistants.iter().all(|index| self.selected[*index]) && uniform(&weights) {
            let weight = weights.first().copied().unwrap_or(1.0);
            return Ok(Some(found.into_iter().map(|range| span(range, weight)).collect()));
        }
        // Number of spans up to and with each assistant turn: one each, or counted in renders of growing prefixes.
        let counts: Vec<usize> = if found.len() == assistants.len() {
            (1..=found.len()).collect()
        } else {
            for index in &assistants {
                self.ask(Request::part(index + 1));
            }
            if !self.pending.is_empty() {
                return Ok(None);
            }
            let counted =
                assistants.iter().map(|index| self.renders.get(&Request::part(index + 1)).map_or(0, |r| r.spans.len()));
            counted.collect()
        };
        if counts.last() != Some(&found.len()) || counts.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(untold("the template's generation tags cannot be told apart by turn"));
        }
        let (mut spans, mut from) = (Vec::new(), 0);
        for (index, upto) in assistants.iter().zip(counts) {
            if self.selected[*index] {
                spans.extend(found[from..upto].iter().map(|range| span(*range, self.weights[*index])));
            }
            from = upto;
        }
        Ok(Some(spans))
    }

    /// Spans of chosen messages from renders of growing prefixes; none while more renders are needed.
    fn region_spans(&mut self, text: &str, control: &ControlTokens, all: bool) -> RowResult<Option<Vec<Span>>> {
        let mut spans = Vec::new();
        for index in 0..self.chat.messages.len() {
            let tagged = self.method == Method::Tags && self.chat.messages[index].role == "assistant";
            if !self.selected[index] || tagged {
                continue;
            }
            let start = match self.renders.get(&self.before(index, all)) {
                _ if index == 0 && !self.before(index, all).prompt => 0,
                Some(before) if text.starts_with(&before.text) => before.text.len(),
                _ => {
                    return Err(untold(&format!(
                        "the chat template does not write the chat up to message {} as the start of the whole chat",
                        index + 1
                    )));
                }
            };
            let Some(end) = self.region_end(index, text, start, control, all)? else { continue };
            spans.push(Span { start, end, weight: self.weights[index] });
        }
        Ok(if self.pending.is_empty() { Some(spans) } else { None })
    }

    /// Where a message ends in the whole text; none when marked renders were asked for first.
    fn region_end(
        &mut self,
        index: usize,
        text: &str,
        start: usize,
        control: &ControlTokens,
        all: bool,
    ) -> RowResult<Option<usize>> {
        let upto = self.renders.get(&Request::part(index + 1)).map(|r| r.text.clone()).unwrap_or_default();
        if text.starts_with(&upto) && upto.len() >= start {
            let end = if all { upto.len() } else { control.turn_end(text, start, upto.len()) };
            return Ok(Some(end));
        }
        // The template writes a turn differently once others follow (as when it drops old reasoning): find the end of
        // its content by a mark, in the whole chat and in the chat that ends with it, and what the template adds there.
        let in_whole = Request { marked: Some(index), ..self.whole() };
        let in_part = Request { marked: Some(index), ..Request::part(index + 1) };
        let problem = format!("the chat template writes message {} differently once others follow it", index + 1);
        if !self.renders.contains_key(&in_whole) {
            if content_end(&self.chat.messages[index]).is_none() {
                return Err(untold(&problem));
            }
            self.ask(in_whole);
            self.ask(in_part);
            return Ok(None);
        }
        let found = (self.mark_in(&in_whole, text), self.mark_in(&in_part, &upto));
        let (Some(at), Some(at_part)) = found else { return Err(untold(&problem)) };
        // What follows the content in both: the end of the turn is in it if a control token is, or all of the part's rest.
        let (rest, rest_part) = (&text[at..], &upto[at_part..]);
        let common = common_prefix(rest, rest_part);
        if at < start || !(common == rest_part.len() || control.is_spelled(&rest[..common])) {
            return Err(untold(&problem));
        }
        Ok(Some(control.turn_end(text, at, at + common)))
    }

    /// Where the content's mark lies, if the render is otherwise the plain one.
    fn mark_in(&self, request: &Request, plain: &str) -> Option<usize> {
        let marked = &self.renders.get(request)?.text;
        let at = marked.find(CONTENT_END)?;
        let rest = &marked[at + CONTENT_END.len_utf8()..];
        (plain.get(..at)? == &marked[..at] && plain.get(at..)? == rest).then_some(at)
    }

    /// The messages of a request, as the template gets them.
    pub fn messages(&self, request: &Request) -> Vec<Map<String, Json>> {
        let part = self.chat.messages.iter().take(request.messages).enumerate();
        part.map(|(index, message)| {
            let mut fields = message.fields.clone();
            if request.marked == Some(index)
                && let Some((mut content, at)) = content_end(message)
            {
                content.insert(at, CONTENT_END);
                fields.insert("content".into(), Json::String(content));
            }
            fields
        })
        .collect()
    }
}

/// Bytes that two texts have in common at their start, whole characters only.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars().zip(b.chars()).take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum()
}

/// A message's text and the place behind its last visible character.
fn content_end(message: &Message) -> Option<(String, usize)> {
    let content = message.fields.get("content")?.as_str()?;
    let at = content.trim_end().len();
    (at > 0).then(|| (content.to_string(), at))
}

fn untold(problem: &str) -> RowError {
    RowError {
        wanted: "a template with {% generation %} tags, or one whose text of a longer chat begins with that of a shorter one".into(),
        ..RowError::new(
            Reason::TemplateError,
            "",
            format!("{problem}, so what the model says cannot be told from what it reads"),
        )
    }
    .remedy("put {% generation %}...{% endgeneration %} around the assistant's part in a copy of the template and set data.template to it, or use a built-in one such as \"chatml\"")
}

fn uniform(weights: &[f32]) -> bool {
    weights.windows(2).all(|pair| pair[0] == pair[1])
}

/// Spans sorted by start; where two overlap, the later one starts where the earlier ends.
fn in_order(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_by_key(|span| (span.start, span.end));
    let mut at = 0;
    for span in &mut spans {
        span.start = span.start.max(at);
        span.end = span.end.max(span.start);
        at = span.end;
    }
    spans.retain(|span| span.start < span.end);
    spans
}

/// Breaks control tokens spelled in a chat and refuses text that holds our own marks; whether a token was spelled.
pub fn neutralise(chat: &mut Chat, control: Option<&ControlTokens>) -> RowResult<bool> {
    let mut spelled = false;
    for (index, message) in chat.messages.iter_mut().enumerate() {
        for (name, value) in &mut message.fields {
            if name != "role" {
                walk(value, control, &mut spelled).map_err(|()| reserved(&format!("messages[{index}].{name}")))?;
            }
        }
    }
    for (name, value) in &mut chat.extra {
        walk(value, control, &mut spelled).map_err(|()| reserved(name))?;
    }
    Ok(spelled)
}

fn reserved(field: &str) -> RowError {
    RowError::bad(field, "it holds one of the noncharacters U+FDD0 to U+FDD3", "text without them")
        .remedy("take them out of the row: Unicode keeps them for programs' own use, and rft marks spans with them")
}

fn walk(value: &mut Json, control: Option<&ControlTokens>, spelled: &mut bool) -> std::result::Result<(), ()> {
    let mut text = |text: &str| -> std::result::Result<Option<String>, ()> {
        if text.contains([MARK, SPAN_START, SPAN_END, CONTENT_END]) {
            return Err(());
        }
        let Some(control) = control else { return Ok(None) };
        *spelled |= control.is_spelled(text);
        match control.neutralise(text) {
            std::borrow::Cow::Borrowed(_) => Ok(None),
            std::borrow::Cow::Owned(marked) => Ok(Some(marked)),
        }
    };
    match value {
        Json::String(content) => {
            if let Some(marked) = text(content)? {
                *content = marked;
            }
        }
        Json::Array(items) => {
            for item in items {
                walk(item, control, spelled)?;
            }
        }
        Json::Object(fields) => {
            let mut renamed = Vec::new();
            for name in fields.keys() {
                if let Some(marked) = text(name)? {
                    renamed.push((name.clone(), marked));
                }
            }
            if !renamed.is_empty() {
                let old = std::mem::take(fields);
                for (name, value) in old {
                    let new = renamed.iter().find(|(from, _)| *from == name).map(|(_, to)| to.clone());
                    fields.insert(new.unwrap_or(name), value);
                }
            }
            for value in fields.values_mut() {
                walk(value, control, spelled)?;
            }
        }
        _ => {}
    }
    Ok(())
}
