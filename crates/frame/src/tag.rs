//! The VLAN tag of a frame (IEEE 802.1Q, 9.6): read from the private head, pushed, popped. Used by the switch where ports belong to
//! VLANs; the sender's bytes are not touched.

use crate::{
    BURST, Burst, Frame, HEAD, HEADROOM, MAX_FRAME, Offload,
    head::{RETAGGED, TAGGED},
};
use ringroad_wire::ethernet::{self, C_TAG, S_TAG};

/// Where the tag is in the private head.
const AT: usize = HEADROOM + 12;
const LEN: usize = ethernet::TAG;

/// A frame's tag, of EtherType 0x8100. Others, such as the 0x88a8 of providers, are payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// It has none.
    None,
    /// The tag control information: priority (3 bits), drop eligible (1 bit), VLAN identifier (12 bits).
    Control(u16),
    /// It ends within its tag, or before the EtherType behind it; or a checksum refers to the tag.
    Broken,
}

/// The heads of a burst's frames and what they say of offloads, before tags were changed.
#[derive(Clone, Debug)]
pub struct Heads {
    frames: [Frame; BURST],
    offloads: [Offload; BURST],
}

/// Reading and changing tags.
impl Burst {
    /// Returns the outermost tag of a frame, and whether another one of the same type follows it.
    pub fn tag(&self, index: usize) -> (Tag, bool) {
        let bytes = self.frames().get(index).map_or(&[][..], Frame::ethernet);
        let [high, low] = C_TAG.to_be_bytes();
        match *bytes.get(12..).unwrap_or_default() {
            [a, b, c, d, e, f, ..] if [a, b] == [high, low] => {
                let fits = self.offload(index).moved(-(LEN as i16)).is_some();
                let tag = if fits { Tag::Control(u16::from_be_bytes([c, d])) } else { Tag::Broken };
                (tag, [e, f] == [high, low])
            }
            [a, b, ..] if [a, b] == [high, low] => (Tag::Broken, false),
            _ => (Tag::None, false),
        }
    }

    /// Changes the tag control information of a frame that has a tag.
    pub fn set_tag(&mut self, index: usize, control: u16) {
        let control = control.to_be_bytes();
        let place = self.frames.get_mut(index).and_then(|frame| frame.head.get_mut(AT + 2..AT + LEN));
        place.into_iter().for_each(|place| place.copy_from_slice(&control));
    }

    /// Pushes a tag with this control information. Returns `false`, and changes nothing, if the frame would be too long or have
    /// more than two tags, which is as many as an MTU leaves room for.
    pub fn push_tag(&mut self, index: usize, control: u16) -> bool {
        let Some(moved) = self.offload(index).moved(LEN as i16) else { return false };
        let Some(frame) = self.frames.get_mut(index) else { return false };
        if frame.len() + LEN > MAX_FRAME || has_two(frame.ethernet()) {
            return false;
        }
        let len = frame.head_len();
        frame.head.copy_within(AT..HEAD - LEN, AT + LEN);
        let [a, b, c, d] = (u32::from(C_TAG) << 16 | u32::from(control)).to_be_bytes();
        if let Some(place) = frame.head.get_mut(AT..AT + LEN) {
            place.copy_from_slice(&[a, b, c, d]);
        }
        // What no longer fits into the head is payload, and is left to the sender's bytes.
        frame.retag((len + LEN).min(HEAD));
        frame.extent += LEN as u32;
        self.move_offload(index, moved);
        true
    }

    /// Pops the tag of a frame that has one.
    pub fn pop_tag(&mut self, index: usize) {
        let Some(moved) = self.offload(index).moved(-(LEN as i16)) else { return };
        let Some(frame) = self.frames.get_mut(index).filter(|frame| frame.head_len() >= TAGGED) else { return };
        frame.head.copy_within(AT + LEN.., AT);
        frame.retag(frame.head_len() - LEN);
        frame.extent -= LEN as u32;
        self.move_offload(index, moved);
    }

    /// Returns the heads, to undo changes of tags.
    #[cold]
    pub fn heads(&self) -> Heads {
        Heads { frames: self.frames, offloads: self.offloads }
    }

    /// Undoes what was done to tags since the heads were returned, of the same frames.
    #[cold]
    pub fn restore(&mut self, heads: &Heads) {
        (self.frames, self.offloads) = (heads.frames, heads.offloads);
    }

    fn move_offload(&mut self, index: usize, moved: Offload) {
        if let Some(offload) = self.offloads.get_mut(index) {
            *offload = moved;
        }
    }
}

impl Frame {
    /// The head has lost a tag or got one, which undoes the opposite.
    fn retag(&mut self, len: usize) {
        const LENGTH: u8 = RETAGGED - 1;
        self.head_len = (self.head_len & !LENGTH | len as u8) ^ RETAGGED;
    }
}

/// Returns whether the frame that begins with these bytes has two tags.
fn has_two(bytes: &[u8]) -> bool {
    let is_tag = |at: usize| {
        let found = bytes.get(at..).and_then(|rest| rest.first_chunk());
        found.is_some_and(|&found| [C_TAG, S_TAG].contains(&u16::from_be_bytes(found)))
    };
    is_tag(12) && is_tag(16)
}

#[cfg(test)]
mod tests;
