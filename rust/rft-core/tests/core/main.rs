//! Properties and whole paths of the core. One binary, because linking is what costs.

#![allow(clippy::unwrap_used)]

mod feed;
mod fuzz;
mod jsonl;
mod masks;
mod pack;
mod plan;
mod prepare;
mod readers;
mod shapes;
mod store;
mod stream;
mod support;
mod tokenizer;
