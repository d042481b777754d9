//! The shader files, compiled into the library.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The text of `shaders/{name}`.
        pub fn file(name: &str) -> Option<&'static str> {
            match name {
                $($name => Some(include_str!(concat!("../../shaders/", $name))),)*
                _ => None,
            }
        }
    };
}

files![];
