//! All that a step writes: kernels `copy_page`, `key_mean`, `append` and `pack_windows` by a step's table.

use super::append::{TokenRows, put_tokens};
use super::key_mean::key_mean;
use super::non_finite_flags::NonFiniteFlags;
use super::pack_windows::pack_pages;
use super::store::CpuStore;
use crate::backend::{NewCentre, WriteInput};
use crate::format::KeyOrValue;
use crate::plan::{Elements, KeyMean, TableSection, TokenWrite, WindowMove, WriteEntry, WriteTable};
use crate::{Error, Result};

/// Does to the stores of the table's layout what the table lists: copies, then centres and tokens of `input`, then
/// windows. An element that is NaN, infinite or beyond [`largest_element`](crate::plan::WriteLayout::largest_element)
/// is stored as zero, and its token is flagged. `input` may be left out where the step reads no tokens.
///
/// # Errors
/// [`Error::Plan`] when the stores or the flags are not those of the layout, or there is no input for tokens,
/// [`Error::Elements`] when keys or values are shorter than their layout says; the stores are as they were.
pub fn write_step(
    stores: &mut [&mut CpuStore],
    input: Option<WriteInput<'_, Elements<'_>, NonFiniteFlags>>,
    table: &WriteTable,
) -> Result<()> {
    check(stores, input, table)?;
    for section in table.layout().sections() {
        match section {
            TableSection::Copies(store) => {
                for entry in table.entries(section) {
                    let WriteEntry::Copy(copy) = entry else { continue };
                    stores[store].copy_page(copy.from, copy.to)?;
                }
            }
            TableSection::Centres(store) => {
                let Some(WriteInput { keys, rows, .. }) = input else { continue };
                let largest = table.layout().largest_centred();
                for entry in table.entries(section) {
                    let WriteEntry::Centre(KeyMean { tokens, slot }) = entry else { continue };
                    key_mean(stores[store], *keys, NewCentre { rows, tokens, slot, largest })?;
                }
            }
            TableSection::Tokens(store) => {
                let Some(input) = input else { continue };
                let of = |entry| if let WriteEntry::Token(write) = entry { Some(write) } else { None };
                let writes: Vec<TokenWrite> = table.entries(section).filter_map(of).collect();
                for (which, elements) in [(KeyOrValue::Key, *input.keys), (KeyOrValue::Value, *input.values)] {
                    let largest = table.layout().largest_element(store, which);
                    let flag = |token| input.flags.set(input.layer, which, token);
                    let rows = TokenRows { elements, rows: input.rows, largest, flag: &flag };
                    put_tokens(stores[store], which, &rows, &writes);
                }
            }
            TableSection::Windows(pair) => {
                let of = |entry| if let WriteEntry::Window(window) = entry { Some(window) } else { None };
                let windows: Vec<WindowMove> = table.entries(section).filter_map(of).collect();
                let pair = table.layout().windows()[pair];
                if let Ok([from, to]) = stores.get_disjoint_mut([pair.from, pair.to]) {
                    pack_pages(from, to, &windows)?;
                }
            }
        }
    }
    Ok(())
}

fn check(
    stores: &[&mut CpuStore],
    input: Option<WriteInput<'_, Elements<'_>, NonFiniteFlags>>,
    table: &WriteTable,
) -> Result<()> {
    let layout = table.layout();
    layout.check_store_count(stores.len())?;
    stores.iter().enumerate().try_for_each(|(index, store)| store.check_step(layout, index))?;
    match input {
        Some(input) => {
            table.check_rows(&input.rows)?;
            input.rows.check("keys", input.keys.len(), layout.shape())?;
            input.rows.check("values", input.values.len(), layout.shape())?;
            input.flags.check_layer(input.layer)
        }
        None if table.tokens_needed() == 0 => Ok(()),
        None => Err(Error::Plan { what: "step", reason: "it reads tokens, but no keys and values were given".into() }),
    }
}
