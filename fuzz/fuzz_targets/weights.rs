#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvpack_fuzz::read_weights(bytes);
});
