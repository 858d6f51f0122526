//! Chats of the same roles are rendered once: the rest is filling in.
//!
//! A shape is the text of a chat with holes for the contents, and where the trained spans lie in it. It is learned by
//! sending three made-up chats of these roles through the same renders and masks as any other chat: from the first come
//! the pieces, and they must give the text and the spans of the other two, byte for byte. It is used only where the
//! template is known to copy contents (see `looks`), and for contents that answer all its questions as the made-up ones do.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use aho_corasick::{AhoCorasick, MatchKind};

use super::{Looks, Masked, Method, Span, THOUGHTS};
use crate::template::{CONTENT_EDGE, MARK, SPAN_END, SPAN_START};
use crate::tokenizer::ControlTokens;

/// Longer chats, and more kinds of chats, are rendered each for itself.
const MAX_MESSAGES: usize = 64;
const MAX_SHAPES: usize = 4096;

/// White space that every strip takes or leaves as a whole, as the probes show.
const OUTER: [char; 4] = [' ', '\n', '\t', '\r'];

/// What the template does to the white space at one side of a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Kept,
    Stripped,
    /// Something else: only contents without any are filled in.
    Unknown,
}

#[derive(Clone, Debug)]
struct Hole {
    message: usize,
    left: Side,
    right: Side,
}

/// A place in the text: behind so many bytes of a literal.
#[derive(Clone, Copy, Debug)]
struct Place {
    literal: usize,
    offset: usize,
}

/// Text and spans of all chats of the same roles.
#[derive(Clone, Debug)]
pub struct Shape {
    /// One more than there are holes.
    literals: Vec<String>,
    holes: Vec<Hole>,
    spans: Vec<(Place, Place, Span)>,
    /// How the spans were found.
    pub method: Method,
    /// How generation prompts go on where the chat does not ([`Masked::partings`]).
    partings: Vec<char>,
}

/// A chat with its spans, filled in.
#[derive(Debug, Default)]
pub struct Filled {
    /// The text; no marks are in it.
    pub text: String,
    /// What is trained on, in order.
    pub spans: Vec<Span>,
    starts: Vec<usize>,
}

/// The shapes of a template, learned as they come.
pub struct Shapes {
    known: RwLock<HashMap<Vec<u8>, Option<Arc<Shape>>>>,
    looks: Looks,
    /// Texts that send a chat to the renderer: control tokens, what the template searches for, our own marks.
    alarm: AhoCorasick,
    borders: Borders,
}

/// Words that a neighbour may complete: a text that ends with the beginning of one, or begins with the end of one.
struct Borders {
    /// Words by their first and by their last byte.
    by_first: Vec<Vec<String>>,
    by_last: Vec<Vec<String>>,
    longest: usize,
}

impl Borders {
    fn new(words: &[String]) -> Borders {
        let (mut by_first, mut by_last) = (vec![Vec::new(); 256], vec![Vec::new(); 256]);
        for word in words.iter().filter(|word| word.len() > 1) {
            let bytes = word.as_bytes();
            by_first[usize::from(bytes[0])].push(word.clone());
            by_last[usize::from(bytes[bytes.len() - 1])].push(word.clone());
        }
        Borders { by_first, by_last, longest: words.iter().map(String::len).max().unwrap_or(0) }
    }

    fn touches(&self, text: &str) -> bool {
        let bytes = text.as_bytes();
        let edge = bytes.len().min(self.longest.saturating_sub(1));
        let ends = |at: usize| {
            let rest = &bytes[at..];
            self.by_first[usize::from(rest[0])].iter().any(|w| w.len() > rest.len() && w.as_bytes().starts_with(rest))
        };
        let begins = |at: usize| {
            let head = &bytes[..=at];
            self.by_last[usize::from(head[at])].iter().any(|w| w.len() > head.len() && w.as_bytes().ends_with(head))
        };
        (bytes.len() - edge..bytes.len()).any(ends) || (0..edge).any(begins)
    }
}

impl Shapes {
    /// For a template that looks at contents only in these ways.
    pub fn new(looks: Looks, control: &ControlTokens) -> Option<Shapes> {
        // Also where rows may bring control tokens of their own: ends of turns are told by them.
        let mut words = control.texts().to_vec();
        words.extend(looks.searched.iter().cloned());
        words.extend(THOUGHTS.iter().map(|(_, close)| (*close).to_string()));
        let borders = Borders::new(&words);
        words.extend([MARK, SPAN_START, SPAN_END, CONTENT_EDGE].map(String::from));
        let alarm = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(&words).ok()?;
        Some(Shapes { known: RwLock::default(), looks, alarm, borders })
    }

    /// The shape of these roles; `learn` gives text and spans of a made-up chat's contents.
    pub fn of(&self, roles: &[u8], learn: impl FnMut(&[String]) -> Option<Masked>) -> Option<Arc<Shape>> {
        let full = {
            let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(shape) = known.get(roles) {
                return shape.clone();
            }
            known.len() >= MAX_SHAPES
        };
        // Learning costs more renders than the chat itself: not for what cannot be remembered.
        if full || roles.len() > MAX_MESSAGES {
            return None;
        }
        // Learned outside the lock: two threads may do so at once, and find the same.
        let shape = self.learn(roles.len(), learn).map(Arc::new);
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.len() < MAX_SHAPES {
            known.insert(roles.to_vec(), shape.clone());
        }
        shape
    }

    fn learn(&self, count: usize, mut learn: impl FnMut(&[String]) -> Option<Masked>) -> Option<Shape> {
        let cores: Vec<String> = (0..count).map(|index| format!("qz{index}zq")).collect();
        let plain = learn(&cores)?;
        let mut shape = cut(&plain, &cores)?;
        // White space around: which of it is kept.
        let wide: Vec<String> = cores.iter().map(|core| format!(" \n\t\r{core}\r\t\n ")).collect();
        let of_wide = learn(&wide)?;
        shape.learn_sides(&of_wide.text, &cores)?;
        if matches!(shape.method, Method::PromptDiffers | Method::HistoryDiffers) {
            // A border is where the chat and another render of it part, taken back to white space: contents that begin
            // with some could move it.
            shape.holes.iter_mut().filter(|hole| hole.left == Side::Kept).for_each(|hole| hole.left = Side::Unknown);
        }
        let odd: Vec<String> = (0..count).map(|index| self.odd_text(index)).collect();
        let of_odd = learn(&odd)?;
        // Contents of two beginnings, so that neither hides a prompt that goes on as it begins.
        shape.partings = [&plain, &of_wide, &of_odd].into_iter().flat_map(|truth| truth.partings.clone()).collect();
        let mut filled = Filled::default();
        for (contents, truth) in [(&cores, &plain), (&wide, &of_wide), (&odd, &of_odd)] {
            let known = self.fits(&shape, count, |index| contents[index].as_str());
            // What is never filled in, as contents with white space around where a side is unknown, need not agree.
            if !known && !std::ptr::eq(contents, &wide) {
                return None;
            }
            shape.fill(|index| contents[index].as_str(), &mut filled);
            if known && (filled.text != truth.text || filled.spans != truth.spans || shape.method != truth.method) {
                return None;
            }
            if truth.lost > 0 {
                return None;
            }
        }
        Some(shape)
    }

    /// A content with all that texts hold: quotes, markup, braces, other scripts, several lines.
    fn odd_text(&self, index: usize) -> String {
        let pieces = [
            "Ünïcode \u{1f600} \u{4f60}\u{597d}",
            "\"quoted\" 'single' \\back\\",
            "<b>&amp; {{ x }} {% if %} {# c #}",
            "line\nline\n\n\tindented  twice",
            "1234567890 1.5e3 True None null",
            "user assistant system tool content",
            "[INST] ### : | - * `code`",
        ];
        let mut text = format!("Q{index}");
        for number in 0..pieces.len() {
            let piece = pieces[(number + index) % pieces.len()];
            if !self.is_alarming(piece) {
                text.push(' ');
                text.push_str(piece);
            }
        }
        text.push_str(&format!(" end{index}."));
        text
    }

    fn is_alarming(&self, text: &str) -> bool {
        self.alarm.is_match(text)
    }

    /// Whether a chat's contents may be filled in.
    pub fn fits<'t>(&self, shape: &Shape, count: usize, content: impl Fn(usize) -> &'t str) -> bool {
        shape.holes.len() == count
            && shape.holes.iter().all(|hole| self.fits_hole(shape, hole, content(hole.message)))
            && (!self.looks.compares_messages
                || (1..count).all(|one| (0..one).all(|other| content(one).trim() != content(other).trim())))
    }

    fn fits_hole(&self, shape: &Shape, hole: &Hole, text: &str) -> bool {
        let visible = text.trim_matches(OUTER);
        let (Some(first), Some(last)) = (visible.chars().next(), visible.chars().next_back()) else { return false };
        let left = visible.as_ptr() as usize - text.as_ptr() as usize;
        let right = text.len() - left - visible.len();
        let odd = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c) || self.looks.stripped.contains(c);
        let odd = |c: char| odd(c) && !(OUTER.contains(&c));
        let looks = &self.looks;
        // A strip of some white space only: what it takes of a content depends on the first character there.
        let partly =
            |side: Side, edge: Option<char>| side == Side::Kept && edge.is_some_and(|c| looks.stripped.contains(c));
        !partly(hole.left, text.chars().next())
            && !partly(hole.right, text.chars().next_back())
            && (left == 0 || hole.left != Side::Unknown)
            && (right == 0 || hole.right != Side::Unknown)
            && !odd(first)
            && !odd(last)
            && !shape.partings.contains(&first)
            && !looks.compared.iter().any(|other| other.trim() == visible)
            && !looks.within.iter().any(|other| other.contains(visible))
            && !self.borders.touches(text)
            && !self.alarm.is_match(text)
    }
}

impl Shape {
    /// Writes a chat.
    pub fn fill<'t>(&self, content: impl Fn(usize) -> &'t str, out: &mut Filled) {
        out.text.clear();
        out.starts.clear();
        out.spans.clear();
        for (index, literal) in self.literals.iter().enumerate() {
            out.starts.push(out.text.len());
            out.text.push_str(literal);
            if let Some(hole) = self.holes.get(index) {
                let mut text = content(hole.message);
                if hole.left == Side::Stripped {
                    text = text.trim_start_matches(OUTER);
                }
                if hole.right == Side::Stripped {
                    text = text.trim_end_matches(OUTER);
                }
                out.text.push_str(text);
            }
        }
        let at = |place: &Place| out.starts[place.literal] + place.offset;
        let spans = self.spans.iter().map(|(start, end, span)| Span { start: at(start), end: at(end), ..*span });
        out.spans.extend(spans);
    }

    /// Which white space around the cores is left in a text made with it.
    fn learn_sides(&mut self, wide: &str, cores: &[String]) -> Option<()> {
        const BEFORE: &str = " \n\t\r";
        const BEHIND: &str = "\r\t\n ";
        let mut at = 0;
        for index in 0..self.literals.len() {
            let end = match self.holes.get(index) {
                Some(hole) => at + wide[at..].find(cores[hole.message].as_str())?,
                None => wide.len(),
            };
            let between = &wide[at..end];
            let behind = if index == 0 { [Side::Stripped; 1].as_slice() } else { &[Side::Kept, Side::Stripped] };
            let before =
                if index == self.holes.len() { [Side::Stripped; 1].as_slice() } else { &[Side::Kept, Side::Stripped] };
            let mut found = None;
            for right in behind {
                for left in before {
                    let (head, foot) =
                        (if *right == Side::Kept { BEHIND } else { "" }, if *left == Side::Kept { BEFORE } else { "" });
                    let rest = between.strip_prefix(head).and_then(|rest| rest.strip_suffix(foot));
                    if rest == Some(self.literals[index].as_str()) {
                        found = Some((*right, *left));
                    }
                }
            }
            let (right, left) = found.unwrap_or((Side::Unknown, Side::Unknown));
            if index > 0 {
                self.holes[index - 1].right = right;
            }
            if let Some(hole) = self.holes.get_mut(index) {
                hole.left = left;
                at = end + cores[hole.message].len();
            }
        }
        Some(())
    }
}

/// The pieces of a text in which each core stands once; none where one does not, or a border lies inside one.
fn cut(masked: &Masked, cores: &[String]) -> Option<Shape> {
    let text = masked.text.as_str();
    let mut found = Vec::with_capacity(cores.len());
    for (message, core) in cores.iter().enumerate() {
        let at = text.find(core.as_str())?;
        if text[at + core.len()..].contains(core.as_str()) {
            return None;
        }
        found.push((at, message));
    }
    found.sort_unstable();
    let (mut literals, mut holes, mut starts, mut at) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (start, message) in found {
        literals.push(text[at..start].to_string());
        starts.push(at);
        holes.push(Hole { message, left: Side::Unknown, right: Side::Unknown });
        at = start + cores[message].len();
    }
    literals.push(text[at..].to_string());
    starts.push(at);
    let place = |position: usize| {
        let literal = starts.partition_point(|start| *start <= position).checked_sub(1)?;
        let offset = position - starts[literal];
        (offset <= literals[literal].len()).then_some(Place { literal, offset })
    };
    let spans = masked.spans.iter().map(|span| Some((place(span.start)?, place(span.end)?, *span)));
    let spans = spans.collect::<Option<Vec<_>>>()?;
    let told = matches!(
        masked.method,
        Method::Whole | Method::Tags | Method::Prefixes | Method::HistoryDiffers | Method::PromptDiffers
    );
    told.then_some(Shape { literals, holes, spans, method: masked.method, partings: Vec::new() })
}
