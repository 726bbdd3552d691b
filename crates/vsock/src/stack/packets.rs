//! Receiving packets: finds the connection of each packet, and answers those that belong to none.

use super::{PacketOwner, Stack};
use crate::{
    connection::{CloseReason, Conn, Verdict, Wanted},
    payload::Payload,
    side::Side,
    types::{Addr, Key, SocketType},
    wrong::{Violation, Wrong},
};
use ringroad_wire::vsock_hdr::{Op, VsockHdr};
use std::sync::{Arc, atomic::Ordering};

impl<S: Side> Stack<S> {
    /// Handles a packet from the peer. Nothing in it has been checked yet.
    pub(super) fn receive(&self, header: &VsockHdr, mut payload: Payload<'_>, wanted: Option<&mut Wanted<'_>>) {
        let actual = payload.len();
        payload.truncate(header.len as usize);
        if self.peer.is_some_and(|peer| peer != header.src_cid) {
            return self.reject(header, Wrong::Source { cid: header.src_cid });
        }
        if header.dst_cid != self.cid {
            if actual >= header.len as usize && self.forward(header, &mut payload) {
                return;
            }
            return self.reject(header, Wrong::Route { cid: header.dst_cid });
        }
        let key = Key { port: header.dst_port, peer: Addr { cid: header.src_cid, port: header.src_port } };
        let conn = self.find(key);
        let Some(kind) = SocketType::new(header.kind).filter(|&kind| self.has(kind)) else {
            return self.fail(conn, header, Wrong::Type { kind: header.kind });
        };
        let Some(op) = Op::new(header.op) else {
            return self.fail(conn, header, Wrong::Operation { op: header.op });
        };
        let Some(conn) = conn else {
            return match op {
                Op::Request => self.request(key, kind, header),
                // A reset for a connection that no longer exists needs no answer.
                Op::Reset => {}
                // Other packets may have been in flight when the connection was closed.
                _ => self.answer(header, Op::Reset),
            };
        };
        if kind != conn.kind {
            return self.fail(Some(conn), header, Wrong::Type { kind: header.kind });
        }
        if op == Op::Data && actual < header.len as usize {
            return self.fail(Some(conn), header, Wrong::Short { len: header.len, actual });
        }
        let (verdict, holds) = {
            let mut inner = conn.lock();
            let verdict = conn.receive(&mut inner, op, header, &mut payload, wanted);
            (verdict, inner.inbox.has_memory() && !std::mem::replace(&mut inner.listed, true))
        };
        if holds {
            self.hold(&conn);
        }
        self.carry_out(&conn, verdict);
    }

    /// Performs the actions that a connection has decided on.
    pub(crate) fn carry_out(&self, conn: &Arc<Conn<S::Relay>>, verdict: Verdict) {
        if verdict == Verdict::default() {
            return;
        }
        if verdict.wake {
            conn.wake();
        }
        if let Some(wrong) = verdict.wrong {
            self.count_wrong(&conn.key, wrong);
        }
        if verdict.closed {
            self.remove(conn);
        }
        if let Some(op) = verdict.reply {
            self.send_control(conn, op);
        }
        if verdict.room && !verdict.closed {
            self.host.room(conn.key);
        }
    }

    /// Handles a packet that violates the protocol: resets its connection if there is one.
    fn fail(&self, conn: Option<Arc<Conn<S::Relay>>>, header: &VsockHdr, wrong: Wrong) {
        let Some(conn) = conn else { return self.reject(header, wrong) };
        let _ = conn.end(&mut conn.lock(), CloseReason::Reset);
        // A reset is never answered with a reset.
        let reply = (header.op != Op::Reset as u16).then_some(Op::Reset);
        self.carry_out(&conn, Verdict { reply, ..Verdict::wrong(wrong) });
    }

    /// Counts and reports a violation on a connection.
    pub(super) fn count_wrong(&self, key: &Key, wrong: Wrong) {
        self.violated(Violation { from: key.peer, to: Addr { cid: self.cid, port: key.port }, connected: true, wrong });
    }

    fn violated(&self, violation: Violation) {
        self.counters.wrong.fetch_add(1, Ordering::Relaxed);
        self.host.violation(violation);
    }

    /// Handles a packet that violates the protocol and belongs to no connection.
    fn reject(&self, header: &VsockHdr, wrong: Wrong) {
        let from = Addr { cid: header.src_cid, port: header.src_port };
        let to = Addr { cid: header.dst_cid, port: header.dst_port };
        self.violated(Violation { from, to, connected: false, wrong });
        if header.op != Op::Reset as u16 {
            self.answer(header, Op::Reset);
        }
    }

    /// Answers a packet that belongs to no connection.
    pub(super) fn answer(&self, header: &VsockHdr, op: Op) {
        let answer = VsockHdr {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            kind: header.kind,
            op: op as u16,
            ..VsockHdr::default()
        };
        self.effect(self.sender.send_control(None, answer));
    }

    pub(crate) fn send_control(&self, conn: &Arc<Conn<S::Relay>>, op: Op) {
        let owner = PacketOwner::Conn(conn.clone());
        self.effect(self.sender.send_control(Some(&owner), conn.header(op)));
    }
}
