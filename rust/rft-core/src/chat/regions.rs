//! Where a message starts and ends in the whole chat, from renders of growing parts of it.

use super::{Edge, Job, Method, Request, Span, Told, content_of, untold};
use crate::template::CONTENT_EDGE;
use crate::tokenizer::ControlTokens;

impl Job {
    /// Spans of chosen messages; none while more renders are needed.
    pub(super) fn region_spans(&mut self, view: usize, text: &str, control: &ControlTokens) -> Told<Option<Vec<Span>>> {
        let mut spans = Vec::new();
        for index in 0..self.views[view].upto {
            let tagged = self.views[view].method == Method::Tags && self.chat.messages[index].role == "assistant";
            if !self.views[view].selected[index] || tagged {
                continue;
            }
            // Both may ask for renders: ask for those of all messages in one round.
            let start = self.region_start(view, index, text, control)?;
            let end = self.region_end(view, index, text, control)?;
            let (Some(start), Some(end)) = (start, end) else { continue };
            // A turn without any text may end with its header.
            let (weight, message) = (self.weights[index], Some(index as u32));
            spans.push(Span { start, end: end.max(start), weight, message });
        }
        Ok(if self.pending.is_empty() { Some(spans) } else { None })
    }

    /// Where a message starts: behind what the model reads before it.
    fn region_start(&mut self, view: usize, index: usize, text: &str, control: &ControlTokens) -> Told<Option<usize>> {
        let before = self.before(index);
        if index == 0 && !before.prompt {
            return Ok(Some(0));
        }
        let Some(read) = self.renders.get(&before).map(|render| render.text.clone()) else {
            return Ok(None);
        };
        if text.starts_with(&read) {
            return Ok(Some(read.len()));
        }
        let problem = format!(
            "the chat template does not write the chat up to message {} as the start of the whole chat",
            index + 1
        );
        if !before.prompt {
            return Err(untold(&problem));
        }
        // The generation prompt says more than the whole chat does there (as when it opens a block of reasoning that
        // an answer without reasoning lacks). The header is what both have in common, if that reaches beyond the
        // content before and not into the message's own, of which marks tell.
        let Some(first) = self.edge(view, index, Edge::Start, &problem)? else { return Ok(None) };
        let low = if index == 0 {
            0
        } else {
            let Some(low) = self.edge(view, index - 1, Edge::End, &problem)? else { return Ok(None) };
            low
        };
        let common = common_prefix(text, &read);
        if common < low || first < low {
            return Err(untold(&problem));
        }
        if index == 0 {
            // Nothing before it holds the header in place: a template that writes a system message of its own before the
            // first turn, and none for an empty chat, puts it into the middle of what the prompt is.
            let head = &text[..first];
            if head.len() >= read.len() && common + common_suffix(head, &read) >= read.len() {
                self.set_method(view, Method::PromptDiffers);
                return Ok(Some(first));
            }
            let header = control.last_end(&text[..common]).is_some();
            if !header || control.last_end(&text[common..first]).is_some() {
                return Err(untold(&problem));
            }
        }
        self.set_method(view, Method::PromptDiffers);
        Ok(Some(if common < first { header_end(text, low, common, control) } else { first }))
    }

    /// The first character of each generation prompt's end that the whole chat does not go on with.
    pub(super) fn partings(&self, view: usize, text: &str) -> Vec<char> {
        if !matches!(self.views[view].method, Method::PromptDiffers | Method::HistoryDiffers) {
            return Vec::new();
        }
        let chosen = (0..self.views[view].upto).filter(|index| self.views[view].selected[*index]);
        let reads = chosen.filter_map(|index| self.renders.get(&self.before(index)));
        reads.filter_map(|read| read.text[common_prefix(text, &read.text)..].chars().next()).collect()
    }

    /// Where the content of a message starts or ends in the whole chat; none if the render that tells was only now asked
    /// for.
    fn edge(&mut self, view: usize, index: usize, edge: Edge, problem: &str) -> Told<Option<usize>> {
        let request = Request { marked: Some((index, edge)), ..Request::part(self.views[view].upto) };
        if self.renders.contains_key(&request) {
            let plain = &self.whole_render(view)?.text;
            return self.mark_in(&request, plain).map(Some).ok_or_else(|| untold(problem));
        }
        if content_of(&self.chat.messages[index], edge).is_none() {
            return Err(untold(problem));
        }
        self.ask(request);
        Ok(None)
    }

    /// Where a message ends: with its last control token if only white space follows.
    fn region_end(&mut self, view: usize, index: usize, text: &str, control: &ControlTokens) -> Told<Option<usize>> {
        let part = Request::part(index + 1);
        let Some(upto) = self.renders.get(&part).map(|render| render.text.clone()) else { return Ok(None) };
        if text.starts_with(&upto) {
            return Ok(Some(if self.all { upto.len() } else { control.turn_end(text, 0, upto.len()) }));
        }
        // The template writes a turn differently once others follow (as when it drops old reasoning): find the end of
        // its content by a mark, in the whole chat and in the chat that ends with it, and what follows it in both.
        let problem = format!("the chat template writes message {} differently once others follow it", index + 1);
        let in_part = Request { marked: Some((index, Edge::End)), ..part };
        let Some(at) = self.edge(view, index, Edge::End, &problem)? else {
            self.ask(in_part);
            return Ok(None);
        };
        if !self.renders.contains_key(&in_part) {
            self.ask(in_part);
            return Ok(None);
        }
        let Some(at_part) = self.mark_in(&in_part, &upto) else { return Err(untold(&problem)) };
        // The end of the turn is in what both have in common if a control token is, or all that follows in the part.
        let (rest, rest_part) = (&text[at..], &upto[at_part..]);
        let common = common_prefix(rest, rest_part);
        self.set_method(view, Method::HistoryDiffers);
        if common == rest_part.len() {
            return Ok(Some(control.turn_end(text, at, at + common)));
        }
        // Both go on differently behind the token (a next turn here, the end of the text there), and may begin alike.
        match control.last_end(&rest[..common]) {
            Some(end) => Ok(Some(at + end)),
            None => Err(untold(&problem)),
        }
    }

    fn set_method(&mut self, view: usize, method: Method) {
        // Spans of other roles beside tagged ones leave the method what it is.
        if self.views[view].method != Method::Tags {
            self.views[view].method = method;
        }
    }

    /// Where the content's mark lies, if the render is otherwise the plain one.
    fn mark_in(&self, request: &Request, plain: &str) -> Option<usize> {
        let marked = &self.renders.get(request)?.text;
        let at = marked.find(CONTENT_EDGE)?;
        let rest = &marked[at + CONTENT_EDGE.len_utf8()..];
        (plain.get(..at)? == &marked[..at] && plain.get(at..)? == rest).then_some(at)
    }
}

/// Bytes that two texts have in common at their start, whole characters only.
fn common_prefix(a: &str, b: &str) -> usize {
    let mut common = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    while !a.is_char_boundary(common) {
        common -= 1;
    }
    common
}

/// Bytes that two texts have in common at their end.
fn common_suffix(a: &str, b: &str) -> usize {
    a.bytes().rev().zip(b.bytes().rev()).take_while(|(x, y)| x == y).count()
}

/// The end of a turn's header in what a prompt and the whole chat share: they may go on alike by chance for a few
/// characters, so it is taken back to the last control token or white space.
fn header_end(text: &str, low: usize, common: usize, control: &ControlTokens) -> usize {
    let shared = &text[low..common];
    let space = shared.rfind(char::is_whitespace).map(|at| at + shared[at..].chars().next().map_or(0, char::len_utf8));
    match space.max(control.last_end(shared)) {
        Some(at) => low + at,
        None => common,
    }
}
