//! Values and errors as JavaScript has them.

use js_sys::JSON;
use kvpack::Error;
use serde::Serialize;
use wasm_bindgen::JsValue;

/// What calls from JavaScript return: a rejected promise or an exception for an error.
pub type JsResult<T> = Result<T, JsValue>;

/// A plain object.
pub fn object<T: Serialize>(value: &T) -> JsResult<JsValue> {
    let text = serde_json::to_string(value).map_err(|error| js_sys::Error::new(&error.to_string()))?;
    JSON::parse(&text)
}

/// An `Error` whose name is that of the variant: `DeviceLost`, `OutOfMemory`, `Limit`, ...
pub fn thrown(error: Error) -> JsValue {
    let variant = format!("{error:?}");
    let thrown = js_sys::Error::new(&error.to_string());
    thrown.set_name(variant.split(|c: char| !c.is_alphanumeric()).next().unwrap_or("Error"));
    thrown.into()
}

/// A count or an index. A conversion to an integer would wrap large numbers, cut fractions off, and take 0 for a
/// missing argument.
pub fn whole(what: &'static str, given: f64) -> JsResult<usize> {
    if given.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&given) {
        return Ok(given as usize);
    }
    let reason = format!("{given} is no whole number from 0 to {}; pass one, as a number", u32::MAX);
    Err(thrown(Error::Plan { what, reason }))
}
