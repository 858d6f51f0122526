//! A conversation -> rendered text and the spans of it that are trained on, by structure alone.
//!
//! The spans come from the template's generation tags, or from renders of growing parts of the chat: what the model
//! reads before message i is the render of the messages before it with the generation prompt, and that must be a prefix
//! of the whole, checked for each chat. No text is searched for what a message says.

mod neutralise;
mod regions;

use std::collections::HashMap;

use serde_json::{Map, Value as Json};

use crate::example::{Chat, Message, Reason, RowError};
use crate::spec::TrainOn;
use crate::template::{CONTENT_EDGE, Rendered};
use crate::tokenizer::ControlTokens;

pub use neutralise::neutralise;

/// One render that a chat needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Messages from the first on.
    pub messages: usize,
    /// Whether the generation prompt is asked for.
    pub prompt: bool,
    /// The message whose content gets a mark, and at which edge.
    pub marked: Option<(usize, Edge)>,
}

/// An edge of a content's visible text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Edge {
    /// Before its first character.
    Start,
    /// Behind its last one.
    End,
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
    /// The same, but a generation prompt says more than the whole chat does at that place.
    PromptDiffers,
}

impl Method {
    /// The words in counts.
    pub fn name(self) -> &'static str {
        match self {
            Method::Whole => "everything",
            Method::Tags => "generation tags",
            Method::Prefixes => "prefix renders",
            Method::PromptDiffers => "prefix renders, prompt differs",
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
                Method::Tags | Method::Prefixes | Method::PromptDiffers => {
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
            Method::Prefixes | Method::PromptDiffers => {
                match self.region_spans(&text, control, *train_on == TrainOn::All)? {
                    Some(spans) => spans,
                    None => return Ok(None),
                }
            }
        };
        let spans = in_order(spans);
        self.check_content(&text, &spans)?;
        Ok(Some(Masked { text, spans, method: self.method }))
    }

    /// A template that writes nothing of what the chosen messages say must not pass for one that does (templates for
    /// images and text leave out contents that are not lists of parts): the last word of one of them has to be there.
    fn check_content(&self, text: &str, spans: &[Span]) -> RowResult<()> {
        let chosen = self.chat.messages.iter().zip(&self.selected).filter(|(_, chosen)| **chosen);
        let written = |word: &str| spans.iter().any(|span| text[span.start..span.end].contains(word));
        if let Some(name) = chosen.clone().flat_map(|(message, _)| called(message)).find(|name| !written(name)) {
            let problem = format!("the chat template does not write tool calls: that of {name:?} is lost");
            return Err(RowError::new(Reason::TemplateError, "", problem).remedy(
                "use a data.template that writes tool_calls, or skip such rows with data.on_error = \"skip\"",
            ));
        }
        let mut words =
            chosen.filter_map(|(message, _)| content_of(message, Edge::End)?.split_whitespace().last()).peekable();
        if spans.is_empty() || words.peek().is_none() {
            return Ok(());
        }
        if words.any(written) {
            return Ok(());
        }
        let problem = "the chat template writes nothing of what the messages to be trained on say";
        Err(RowError::new(Reason::TemplateError, "", problem)
            .remedy("use another data.template: `rft inspect` shows what it makes of a row"))
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

    /// The messages of a request, as the template gets them.
    pub fn messages(&self, request: &Request) -> Vec<Map<String, Json>> {
        let part = self.chat.messages.iter().take(request.messages).enumerate();
        part.map(|(index, message)| {
            let mut fields = message.fields.clone();
            if let Some((marked, edge)) = request.marked
                && marked == index
                && let Some(content) = content_mut(&mut fields, edge)
                && let Some(at) = edge_of(content, edge)
            {
                content.insert(at, CONTENT_EDGE);
            }
            fields
        })
        .collect()
    }
}

/// A message's content: the text, or its first or last text part.
fn content_mut(fields: &mut Map<String, Json>, edge: Edge) -> Option<&mut String> {
    match fields.get_mut("content")? {
        Json::String(text) => Some(text),
        Json::Array(parts) => {
            let part = match edge {
                Edge::Start => parts.first_mut(),
                Edge::End => parts.last_mut(),
            };
            match part?.get_mut("text")? {
                Json::String(text) => Some(text),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Names of the functions that a message calls.
fn called(message: &Message) -> impl Iterator<Item = &str> {
    let calls = message.fields.get("tool_calls").and_then(Json::as_array);
    calls.into_iter().flatten().filter_map(|call| call.get("function").unwrap_or(call).get("name")?.as_str())
}

/// The content of a message for a look.
fn content_of(message: &Message, edge: Edge) -> Option<&str> {
    match message.fields.get("content")? {
        Json::String(text) => Some(text),
        Json::Array(parts) => {
            let part = if edge == Edge::Start { parts.first() } else { parts.last() };
            part?.get("text")?.as_str()
        }
        _ => None,
    }
}

/// Where the visible text of a content starts or ends: templates strip the white space around it.
fn edge_of(content: &str, edge: Edge) -> Option<usize> {
    let visible = content.trim();
    if visible.is_empty() {
        return None;
    }
    Some(match edge {
        Edge::Start => content.len() - content.trim_start().len(),
        Edge::End => content.trim_end().len(),
    })
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
