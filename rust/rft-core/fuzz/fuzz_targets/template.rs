#![no_main]

mod guard;
#[path = "../targets.rs"]
#[allow(dead_code)]
mod targets;

libfuzzer_sys::fuzz_target!(init: guard::listen(), |data: &[u8]| guard::hold(targets::template, data));
