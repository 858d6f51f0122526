//! A conversation -> rendered text and the spans of it that are trained on, by structure alone.
//!
//! The spans come from the template's generation tags, or from renders of growing parts of the chat: what the model
//! reads before message i is the render of the messages before it with the generation prompt, and that must be a prefix
//! of the whole, checked for each chat. No text is searched for what a message says.

mod ends;
mod looks;
mod neutralise;
mod regions;
mod shape;

use std::collections::HashMap;

use serde_json::{Map, Value as Json};

use crate::example::{Chat, Message, ROLES};
use crate::row_error::{Reason, RowError};
use crate::spec::{EndOfTurn, Thinking, TrainOn};
use crate::template::{CONTENT_EDGE, Rendered};
use crate::tokenizer::ControlTokens;

pub use looks::{Looks, looks};
pub use neutralise::neutralise;
pub use shape::{Filled, Shape, Shapes};

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
    /// The message it belongs to, where the method tells.
    pub message: Option<u32>,
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
    /// The same, but the template writes earlier turns differently once others follow.
    HistoryDiffers,
    /// A row a turn, since the template drops reasoning of earlier ones.
    Turns,
    /// The turns as they are written when they are last, put into the whole chat.
    Kept,
    /// The row says itself what is trained on.
    Stated,
}

impl Method {
    /// The words in counts.
    pub fn name(self) -> &'static str {
        match self {
            Method::Whole => "everything",
            Method::Tags => "generation tags",
            Method::Prefixes => "prefix renders",
            Method::PromptDiffers => "prefix renders, prompt differs",
            Method::HistoryDiffers => "prefix renders, earlier turns differ",
            Method::Turns => "a document a turn",
            Method::Kept => "turns with their reasoning put back",
            Method::Stated => "the row itself",
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
    /// Messages to be trained on whose reasoning the text lacks.
    pub lost: u32,
    /// Whether there are tools and the text names none of them.
    pub tools_ignored: bool,
    /// How generation prompts go on where the text does not: a content that begins so may move its border.
    pub(crate) partings: Vec<char>,
}

type RowResult<T> = std::result::Result<T, RowError>;

/// Why spans are not told.
enum Trouble {
    /// What the model says cannot be told from what it reads in this text; it may be in that of a part of the chat.
    Untold(RowError),
    /// The row is at fault, or the template refuses it.
    Refused(RowError),
}

impl Trouble {
    fn error(self) -> RowError {
        match self {
            Trouble::Untold(error) | Trouble::Refused(error) => error,
        }
    }
}

impl From<RowError> for Trouble {
    fn from(error: RowError) -> Trouble {
        Trouble::Refused(error)
    }
}

type Told<T> = std::result::Result<T, Trouble>;

/// What is wanted of every chat.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Which turns are trained on.
    pub train_on: TrainOn,
    /// What becomes of reasoning that the template drops.
    pub thinking: Thinking,
    /// Whether the token that ends a turn is trained on.
    pub end_of_turn: EndOfTurn,
    /// Whether the template has generation tags.
    pub tagged: bool,
}

/// The chat up to a message, and what of it is trained on.
struct View {
    upto: usize,
    selected: Vec<bool>,
    method: Method,
}

/// Where a job is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The chat as one document.
    Whole,
    /// Its turns, each as the last one.
    Turns,
}

/// A chat on its way: asks for renders until it knows its spans.
pub struct Job {
    chat: Chat,
    weights: Vec<f32>,
    all: bool,
    thinking: Thinking,
    end_of_turn: EndOfTurn,
    stage: Stage,
    /// The whole chat; then a view a turn.
    views: Vec<View>,
    pending: Vec<Request>,
    renders: HashMap<Request, Rendered>,
}

impl Job {
    /// `weight` is the row's own.
    pub fn new(chat: Chat, weight: f32, wanted: &Wanted) -> Job {
        let weights: Vec<f32> = chat.messages.iter().map(|message| message.weight * weight).collect();
        let selected = selected(&chat, &weights, &wanted.train_on);
        let all = wanted.train_on == TrainOn::All;
        let method = if all && selected.iter().all(|chosen| *chosen) && uniform(&weights) {
            Method::Whole
        } else if wanted.tagged && !all {
            Method::Tags
        } else {
            Method::Prefixes
        };
        let view = View { upto: chat.messages.len(), selected, method };
        let mut job = Job {
            chat,
            weights,
            all,
            thinking: wanted.thinking,
            end_of_turn: wanted.end_of_turn,
            stage: Stage::Whole,
            views: vec![view],
            pending: Vec::new(),
            renders: HashMap::new(),
        };
        job.ask_first(0);
        job
    }

    /// Whether any message is to be trained on.
    pub fn wants_any(&self) -> bool {
        self.views[0].selected.iter().any(|chosen| *chosen)
    }

    /// Whether all messages to be trained on are empty: a span of each would hold the end of a turn and nothing else.
    pub fn says_nothing(&self) -> bool {
        let mut chosen = self.chat.messages.iter().zip(&self.views[0].selected).filter(|(_, chosen)| **chosen);
        chosen.all(|(message, _)| {
            content_of(message, Edge::End).is_none_or(|content| content.trim().is_empty())
                && !message.fields.contains_key("tool_calls")
                && reasoning_of(message).is_none()
        })
    }

    /// Roles of the messages, a bit each, as in [`ROLES`].
    pub fn roles(&self) -> u8 {
        let index = |message: &Message| ROLES.iter().position(|role| *role == message.role);
        self.chat.messages.iter().filter_map(index).fold(0, |bits, index| bits | 1 << index)
    }

    /// Roles (as in [`ROLES`]) and texts, where the chat holds nothing else.
    pub fn plain(&self) -> Option<(Vec<u8>, Vec<&str>)> {
        if !self.chat.extra.is_empty() || self.weights.iter().any(|weight| *weight != 1.0) {
            return None;
        }
        self.chat.messages.iter().map(plain_text).collect::<Option<Vec<_>>>().map(|list| list.into_iter().unzip())
    }

    /// The conversation.
    pub fn chat(&self) -> &Chat {
        &self.chat
    }

    /// The same, when the spans are told.
    pub fn into_chat(self) -> Chat {
        self.chat
    }

    /// What has to be rendered next; nothing when the spans can be told.
    pub fn pending(&self) -> &[Request] {
        &self.pending
    }

    fn ask(&mut self, request: Request) {
        if !self.renders.contains_key(&request) && !self.pending.contains(&request) {
            self.pending.push(request);
        }
    }

    fn ask_first(&mut self, view: usize) {
        let View { upto, ref selected, method } = self.views[view];
        let mut wanted = vec![Request::part(upto)];
        for (index, chosen) in selected.iter().enumerate().take(upto) {
            let assistant = self.chat.messages[index].role == "assistant" && !self.all;
            if *chosen && method != Method::Whole && !(method == Method::Tags && assistant) {
                wanted.extend([self.before(index), Request::part(index + 1)]);
            }
        }
        wanted.into_iter().for_each(|request| self.ask(request));
    }

    /// What the model reads before a message: with the generation prompt where the message is generated.
    fn before(&self, index: usize) -> Request {
        let prompt = self.chat.messages[index].role == "assistant" && !self.all;
        Request { messages: index, prompt, marked: None }
    }

    /// Takes the renders of [`Job::pending`], in order. The job may then ask for more.
    pub fn answer(
        &mut self,
        renders: Vec<std::result::Result<Rendered, String>>,
        control: &ControlTokens,
    ) -> RowResult<Option<Vec<Masked>>> {
        for (request, render) in std::mem::take(&mut self.pending).into_iter().zip(renders) {
            match render {
                Ok(render) => {
                    self.renders.insert(request, render);
                }
                Err(problem) => return Err(self.refused(request, &problem)),
            }
        }
        if self.stage == Stage::Whole {
            let turns = self.views[0].selected.iter().filter(|chosen| **chosen).count();
            let masked = match self.masked(0, control) {
                Ok(None) => return Ok(None),
                Ok(Some(masked)) => masked,
                Err(Trouble::Untold(_)) if self.thinking == Thinking::Split && turns > 1 => {
                    self.pending.clear();
                    return self.begin_turns(control, None);
                }
                Err(trouble) => return Err(trouble.error()),
            };
            // Reasoning of the last message cannot be had back: the template does not write any.
            let lost = self.lost(0, &masked);
            let earlier: Vec<usize> = lost.into_iter().filter(|index| index + 1 < self.chat.messages.len()).collect();
            match self.thinking {
                Thinking::Split if !earlier.is_empty() => return self.begin_turns(control, None),
                Thinking::Keep if !earlier.is_empty() => return self.begin_turns(control, Some(&earlier)),
                _ => return Ok(Some(vec![masked])),
            }
        }
        self.finish_turns(control)
    }

    /// From here on each turn is looked at as the last one of its chat: all that are chosen, or those of `only`.
    fn begin_turns(&mut self, control: &ControlTokens, only: Option<&[usize]>) -> RowResult<Option<Vec<Masked>>> {
        self.stage = Stage::Turns;
        let (selected, method) = (self.views[0].selected.clone(), self.views[0].method);
        let method = if method == Method::Tags { Method::Tags } else { Method::Prefixes };
        let mut from = 0;
        for index in 0..selected.len() {
            let turn = selected[index] && self.chat.messages[index].role == "assistant";
            let last = index + 1 == selected.len() && selected[from..].iter().any(|chosen| *chosen);
            let own = match only {
                Some(only) => only.contains(&index),
                None => turn || last,
            };
            if own {
                let first = if only.is_some() { index } else { from };
                let chosen = (0..=index).map(|other| other >= first && selected[other]).collect();
                self.views.push(View { upto: index + 1, selected: chosen, method });
                self.ask_first(self.views.len() - 1);
                from = index + 1;
            }
        }
        if self.pending.is_empty() { self.finish_turns(control) } else { Ok(None) }
    }

    fn finish_turns(&mut self, control: &ControlTokens) -> RowResult<Option<Vec<Masked>>> {
        let mut turns = Vec::new();
        for view in 1..self.views.len() {
            if let Some(masked) = self.masked(view, control).map_err(Trouble::error)? {
                turns.push(masked);
            }
        }
        if !self.pending.is_empty() {
            return Ok(None);
        }
        if self.thinking == Thinking::Keep {
            return self.put_back(turns, control).map(|masked| Some(vec![masked]));
        }
        // A template that writes no reasoning at all gives none back to the turns: the chat stays whole.
        let lost: u32 = turns.iter().map(|masked| masked.lost).sum();
        if lost > 0
            && let Ok(Some(whole)) = self.masked(0, control)
            && whole.lost <= lost
        {
            return Ok(Some(vec![whole]));
        }
        turns.iter_mut().for_each(|masked| masked.method = Method::Turns);
        Ok(Some(turns))
    }

    /// The whole chat, with the turns that lost their reasoning as they are written where they are last.
    fn put_back(&mut self, turns: Vec<Masked>, control: &ControlTokens) -> RowResult<Masked> {
        let no = |index: usize| {
            let problem = format!(
                "the place of message {} in the whole chat is not told, so its reasoning cannot be kept",
                index + 1
            );
            RowError::new(Reason::TemplateError, "", problem)
                .remedy("set data.thinking = \"split\" (a document a turn) or \"template\" (as the template writes it)")
        };
        let Some(mut whole) = self.masked(0, control).map_err(Trouble::error)? else {
            return Err(no(0));
        };
        for (turn, view) in turns.into_iter().zip(&self.views[1..]).rev() {
            let index = view.upto - 1;
            let of_turn = |span: &&Span| span.message == Some(index as u32);
            let (mut old, mut new) = (whole.spans.iter().filter(of_turn), turn.spans.iter().filter(of_turn));
            let (Some(old), None, Some(new), None) = (old.next().copied(), old.next(), new.next(), new.next()) else {
                return Err(no(index));
            };
            let text = &turn.text[new.start..new.end];
            let grown = text.len() as isize - (old.end - old.start) as isize;
            whole.text.replace_range(old.start..old.end, text);
            let moved = |at: usize| if at >= old.end { at.saturating_add_signed(grown) } else { at };
            for span in &mut whole.spans {
                (span.start, span.end) = (moved(span.start), moved(span.end));
            }
        }
        whole.lost = self.lost(0, &whole).len() as u32;
        whole.method = Method::Kept;
        Ok(whole)
    }

    /// Text and spans of a view; none while more renders are needed.
    fn masked(&mut self, view: usize, control: &ControlTokens) -> Told<Option<Masked>> {
        let text = self.whole_render(view)?.text.clone();
        let mut spans = match self.views[view].method {
            Method::Whole => {
                let weight = self.weights.first().copied().unwrap_or(1.0);
                vec![Span { start: 0, end: text.len(), weight, message: None }]
            }
            Method::Tags => {
                let Some(mut spans) = self.tag_spans(view)? else { return Ok(None) };
                let Some(others) = self.region_spans(view, &text, control)? else { return Ok(None) };
                spans.extend(others);
                spans
            }
            _ => match self.region_spans(view, &text, control)? {
                Some(spans) => spans,
                None => return Ok(None),
            },
        };
        let method = self.views[view].method;
        if method != Method::Whole {
            match self.end_of_turn {
                EndOfTurn::Auto => {}
                EndOfTurn::Train => {
                    spans.iter_mut().for_each(|span| span.end = control.end_behind(&text, span.start, span.end));
                }
                EndOfTurn::Mask => {
                    spans.iter_mut().for_each(|span| span.end = control.without_end(&text, span.start, span.end));
                }
            }
        }
        let spans = in_order(spans);
        self.check_content(view, &text, &spans)?;
        let tools_ignored = self.names_no_tool(&text);
        let partings = self.partings(view, &text);
        let mut masked = Masked { text, spans, method, lost: 0, tools_ignored, partings };
        masked.lost = self.lost(view, &masked).len() as u32;
        Ok(Some(masked))
    }

    fn names_no_tool(&self, text: &str) -> bool {
        let name = |tool: &'_ Json| tool.get("function").unwrap_or(tool).get("name")?.as_str().map(str::to_string);
        let Some(Json::Array(tools)) = self.chat.extra.get("tools") else { return false };
        let mut names = tools.iter().filter_map(name).peekable();
        names.peek().is_some() && !names.any(|name| text.contains(&name))
    }

    /// Chosen messages of a view whose reasoning its text lacks.
    fn lost(&self, view: usize, masked: &Masked) -> Vec<usize> {
        let written = |index: usize, words: &str| {
            let own = |span: &&Span| span.message.is_none_or(|message| message as usize == index);
            masked.spans.iter().filter(own).any(|span| masked.text[span.start..span.end].contains(words))
        };
        let chosen = self.views[view].selected.iter().enumerate().filter(|(_, chosen)| **chosen);
        let reasoned = chosen.filter_map(|(index, _)| Some((index, reasoning_of(&self.chat.messages[index])?)));
        reasoned.filter(|(index, words)| !written(*index, words)).map(|(index, _)| index).collect()
    }

    /// A template that writes nothing of what the chosen messages say must not pass for one that does (templates for
    /// images and text leave out contents that are not lists of parts): the last word of one of them has to be there.
    fn check_content(&self, view: usize, text: &str, spans: &[Span]) -> RowResult<()> {
        let chosen = self.chat.messages.iter().zip(&self.views[view].selected).filter(|(_, chosen)| **chosen);
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

    fn whole_render(&self, view: usize) -> RowResult<&Rendered> {
        self.renders
            .get(&Request::part(self.views[view].upto))
            .ok_or_else(|| RowError::new(Reason::TemplateError, "", "the chat was not rendered"))
    }

    /// Spans of the generation tags that belong to chosen messages; none while more renders are needed.
    fn tag_spans(&mut self, view: usize) -> Told<Option<Vec<Span>>> {
        let found = self.whole_render(view)?.spans.clone();
        let View { upto, ref selected, .. } = self.views[view];
        let assistants: Vec<usize> = (0..upto).filter(|index| self.chat.messages[*index].role == "assistant").collect();
        let weights: Vec<f32> = assistants.iter().map(|index| self.weights[*index]).collect();
        let every = assistants.iter().all(|index| selected[*index]) && uniform(&weights);
        // Number of spans up to and with each assistant turn: one each, or counted in renders of growing prefixes.
        let counts: Vec<usize> = if found.len() == assistants.len() {
            (1..=found.len()).collect()
        } else if every {
            let weight = weights.first().copied().unwrap_or(1.0);
            let span = |(start, end): (usize, usize)| Span { start, end, weight, message: None };
            return Ok(Some(found.into_iter().map(span).collect()));
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
        if counts.last().copied().unwrap_or(0) != found.len() || counts.windows(2).any(|pair| pair[0] > pair[1]) {
            return Err(untold("the template's generation tags cannot be told apart by turn"));
        }
        let (mut spans, mut from) = (Vec::new(), 0);
        for (index, upto) in assistants.iter().zip(counts) {
            if self.views[view].selected[*index] {
                spans.extend(found[from..upto].iter().map(|&(start, end)| Span {
                    start,
                    end,
                    weight: self.weights[*index],
                    message: Some(*index as u32),
                }));
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
            {
                content.insert(edge_of(content, edge), CONTENT_EDGE);
            }
            fields
        })
        .collect()
    }
}

/// Role and text of a message that holds nothing else.
fn plain_text(message: &Message) -> Option<(u8, &str)> {
    let role = ROLES.iter().position(|role| *role == message.role)? as u8;
    let text = match message.fields.get("content")? {
        Json::String(text) => text,
        Json::Array(parts) if parts.len() == 1 => parts[0].get("text")?.as_str()?,
        _ => return None,
    };
    (message.fields.len() == 2 && message.train.is_none()).then_some((role, text))
}

/// Which messages are trained on.
fn selected(chat: &Chat, weights: &[f32], train_on: &TrainOn) -> Vec<bool> {
    let last = chat.messages.iter().rposition(|message| message.role == "assistant");
    let chosen = |(index, message): (usize, &Message)| {
        let chosen = match train_on {
            TrainOn::Assistant => message.role == "assistant",
            TrainOn::Last => Some(index) == last,
            TrainOn::All => true,
            TrainOn::Roles(roles) => roles.contains(&message.role),
        };
        message.train.unwrap_or(chosen) && weights[index] > 0.0
    };
    chat.messages.iter().enumerate().map(chosen).collect()
}

/// What a message says in thought: a field of its own, or a block at the head of its content.
pub fn reasoning_of(message: &Message) -> Option<&str> {
    let field =
        ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| message.fields.get(*name)?.as_str());
    let inline = || {
        let content = content_of(message, Edge::Start)?;
        THOUGHTS.iter().find_map(|(open, close)| {
            let (head, _) = content.split_once(close)?;
            Some(head.rsplit_once(open).map_or(head, |(_, thought)| thought))
        })
    };
    let text = field.or_else(inline)?.trim();
    if text.is_empty() { None } else { Some(text) }
}

/// How models open and close their reasoning in a text.
const THOUGHTS: [(&str, &str); 6] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
];

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
fn edge_of(content: &str, edge: Edge) -> usize {
    match edge {
        Edge::Start if content.trim().is_empty() => 0,
        Edge::Start => content.len() - content.trim_start().len(),
        Edge::End if content.trim().is_empty() => content.len(),
        Edge::End => content.trim_end().len(),
    }
}

fn untold(problem: &str) -> Trouble {
    let error = RowError {
        wanted: "a template with {% generation %} tags, or one whose text of a longer chat begins with that of a shorter one".into(),
        ..RowError::new(
            Reason::TemplateError,
            "",
            format!("{problem}, so what the model says cannot be told from what it reads"),
        )
    }
    .remedy("put {% generation %}...{% endgeneration %} around the assistant's part in a copy of the template and set data.template to it, or use a built-in one such as \"chatml\"");
    Trouble::Untold(error)
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
