//! Registers of the 82540EM and their bits (8254x Software Developer's Manual, 13). Offsets are in bytes from the start of BAR 0.
//! Used by both ends, and by whoever programs the device by hand.

/// Size of the register BAR in bytes.
pub const BAR: u64 = 128 << 10;

macro_rules! registers {
    ($($(#[$doc:meta])* $name:ident = $offset:expr;)*) => { $($(#[$doc])* pub const $name: u32 = $offset;)* };
}

registers! {
    /// Device control.
    CTRL = 0x0000;
    /// Device status; read only.
    STATUS = 0x0008;
    /// EEPROM, bit by bit.
    EECD = 0x0010;
    /// EEPROM, word by word.
    EERD = 0x0014;
    /// Extended device control.
    CTRL_EXT = 0x0018;
    /// Flash access.
    FLA = 0x001c;
    /// Access to the PHY.
    MDIC = 0x0020;
    /// Flow control address, low.
    FCAL = 0x0028;
    /// Flow control address, high.
    FCAH = 0x002c;
    /// Flow control type.
    FCT = 0x0030;
    /// EtherType of VLAN tags.
    VET = 0x0038;
    /// Causes of interrupts; cleared when read.
    ICR = 0x00c0;
    /// Least interval between interrupts, in units of 256 ns.
    ITR = 0x00c4;
    /// Sets causes.
    ICS = 0x00c8;
    /// Interrupt mask; writing sets bits.
    IMS = 0x00d0;
    /// Clears bits of the interrupt mask.
    IMC = 0x00d8;
    /// Receive control.
    RCTL = 0x0100;
    /// Flow control transmit timer.
    FCTTV = 0x0170;
    /// Transmit configuration word (fibre).
    TXCW = 0x0178;
    /// Receive configuration word (fibre).
    RXCW = 0x0180;
    /// Transmit control.
    TCTL = 0x0400;
    /// Gap between transmitted frames.
    TIPG = 0x0410;
    /// Transmit burst timer.
    TBT = 0x0448;
    /// Adaptive gap between frames.
    AIT = 0x0458;
    /// LEDs.
    LEDCTL = 0x0e00;
    /// Division of the packet buffer.
    PBA = 0x1000;
    /// Flow control threshold, low.
    FCRTL = 0x2160;
    /// Flow control threshold, high.
    FCRTH = 0x2168;
    /// First of the registers of the receive FIFO.
    RDFH = 0x2410;
    /// Receive ring: address, low.
    RDBAL = 0x2800;
    /// Receive ring: address, high.
    RDBAH = 0x2804;
    /// Receive ring: length in bytes.
    RDLEN = 0x2808;
    /// Receive ring: head.
    RDH = 0x2810;
    /// Receive ring: tail.
    RDT = 0x2818;
    /// Receive delay since the last packet, in units of 1.024 µs.
    RDTR = 0x2820;
    /// Receive descriptor control.
    RXDCTL = 0x2828;
    /// Receive delay since the first packet, in units of 1.024 µs.
    RADV = 0x282c;
    /// Size of packets that interrupt without delay.
    RSRPD = 0x2c00;
    /// First of the registers of the transmit FIFO.
    TDFH = 0x3410;
    /// Transmit ring: address, low.
    TDBAL = 0x3800;
    /// Transmit ring: address, high.
    TDBAH = 0x3804;
    /// Transmit ring: length in bytes.
    TDLEN = 0x3808;
    /// Transmit ring: head.
    TDH = 0x3810;
    /// Transmit ring: tail.
    TDT = 0x3818;
    /// Transmit delay since the last packet, in units of 1.024 µs.
    TIDV = 0x3820;
    /// Transmit descriptor control.
    TXDCTL = 0x3828;
    /// Transmit delay since the first packet, in units of 1.024 µs.
    TADV = 0x382c;
    /// Segmentation pad and minimum threshold.
    TSPMT = 0x3830;
    /// Receive checksum control.
    RXCSUM = 0x5000;
    /// Multicast table, 128 words.
    MTA = 0x5200;
    /// Receive addresses: 16 pairs of words.
    RA = 0x5400;
    /// VLAN filter table, 128 words.
    VFTA = 0x5600;
    /// Wake up control.
    WUC = 0x5800;
    /// Wake up filter control.
    WUFC = 0x5808;
    /// Wake up status.
    WUS = 0x5810;
    /// Management control.
    MANC = 0x5820;
    /// IP addresses valid.
    IPAV = 0x5838;
    /// IPv4 addresses.
    IP4AT = 0x5840;
    /// IPv6 addresses.
    IP6AT = 0x5880;
    /// Wake up packet length.
    WUPL = 0x5900;
    /// Wake up packet memory.
    WUPM = 0x5a00;
    /// Flexible filter lengths.
    FFLT = 0x5f00;
    /// Flexible filter masks.
    FFMT = 0x9000;
    /// Flexible filter values.
    FFVT = 0x9800;
    /// Packet buffer, 64 KiB.
    PBM = 0x10000;
}

/// Statistics registers (13.7), each cleared when read.
pub mod statistics {
    registers! {
        /// Missed packets: no buffer.
        MPC = 0x4010;
        /// Packets received, by length: 64 bytes.
        PRC64 = 0x405c;
        /// Good packets received.
        GPRC = 0x4074;
        /// Broadcast packets received.
        BPRC = 0x4078;
        /// Multicast packets received.
        MPRC = 0x407c;
        /// Good packets transmitted.
        GPTC = 0x4080;
        /// Good octets received, low; not cleared when read.
        GORCL = 0x4088;
        /// Good octets received, high; clears both.
        GORCH = 0x408c;
        /// Good octets transmitted, low.
        GOTCL = 0x4090;
        /// Good octets transmitted, high.
        GOTCH = 0x4094;
        /// Packets received without a buffer.
        RNBC = 0x40a0;
        /// Packets received that are too short.
        RUC = 0x40a4;
        /// Packets received that are too long.
        ROC = 0x40ac;
        /// Octets received, low.
        TORL = 0x40c0;
        /// Octets received, high.
        TORH = 0x40c4;
        /// Octets transmitted, low.
        TOTL = 0x40c8;
        /// Octets transmitted, high.
        TOTH = 0x40cc;
        /// Packets received.
        TPR = 0x40d0;
        /// Packets transmitted.
        TPT = 0x40d4;
        /// Packets transmitted, by length: 64 bytes.
        PTC64 = 0x40d8;
        /// Multicast packets transmitted.
        MPTC = 0x40f0;
        /// Broadcast packets transmitted.
        BPTC = 0x40f4;
        /// Segmentation contexts.
        TSCTC = 0x40f8;
        /// Segmentation contexts that failed.
        TSCTFC = 0x40fc;
    }

    /// First statistics register.
    pub const FIRST: u32 = 0x4000;
    /// Behind the last one.
    pub const END: u32 = 0x4128;
}

macro_rules! bits {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => { $($(#[$doc])* pub const $name: u32 = $value;)* };
}

/// Bits of [`CTRL`] (13.4.1).
pub mod ctrl {
    bits! {
        /// Full duplex.
        FD = 1;
        /// Automatic detection of the speed.
        ASDE = 1 << 5;
        /// Set link up.
        SLU = 1 << 6;
        /// Reset; clears itself.
        RST = 1 << 26;
        /// VLAN tags are stripped and inserted.
        VME = 1 << 30;
        /// Reset of the PHY.
        PHY_RST = 1 << 31;
    }
}

/// Bits of [`STATUS`] (13.4.2).
pub mod status {
    bits! {
        /// Full duplex.
        FD = 1;
        /// Link up.
        LU = 1 << 1;
        /// 1000 Mb/s.
        SPEED_1000 = 2 << 6;
        /// 1000 Mb/s was detected.
        ASDV_1000 = 2 << 8;
    }
}

/// Bits of [`EECD`] (13.4.3).
pub mod eecd {
    bits! {
        /// Clock.
        SK = 1;
        /// Chip select.
        CS = 1 << 1;
        /// Data to the EEPROM.
        DI = 1 << 2;
        /// Data from the EEPROM.
        DO = 1 << 3;
        /// Software asks for access.
        REQ = 1 << 6;
        /// Access is granted.
        GNT = 1 << 7;
        /// There is an EEPROM.
        PRES = 1 << 8;
    }
}

/// Bits of [`EERD`] (13.4.4).
pub mod eerd {
    bits! {
        /// Start reading.
        START = 1;
        /// Reading is done.
        DONE = 1 << 4;
    }
}

/// Bits of [`CTRL_EXT`] (13.4.5).
pub mod ctrl_ext {
    bits! {
        /// Registers are loaded from the EEPROM again; clears itself.
        EE_RST = 1 << 13;
    }
}

/// Bits of [`MDIC`] (13.4.6).
pub mod mdic {
    bits! {
        /// Write.
        WRITE = 1 << 26;
        /// Read.
        READ = 2 << 26;
        /// Done.
        READY = 1 << 28;
        /// Interrupt when done.
        INT_EN = 1 << 29;
        /// There is no such PHY or register.
        ERROR = 1 << 30;
    }
    /// Position of the register's number.
    pub const REGISTER: u32 = 16;
    /// Position of the PHY's address.
    pub const PHY: u32 = 21;
}

/// Causes of interrupts, in [`ICR`], [`ICS`], [`IMS`] and [`IMC`] (13.4.17).
pub mod cause {
    bits! {
        /// Transmit descriptor written back.
        TXDW = 1;
        /// Transmit ring empty.
        TXQE = 1 << 1;
        /// Link status change.
        LSC = 1 << 2;
        /// Receive ring at its threshold.
        RXDMT0 = 1 << 4;
        /// Receive overrun.
        RXO = 1 << 6;
        /// Receive timer.
        RXT0 = 1 << 7;
        /// MDIO access complete.
        MDAC = 1 << 9;
        /// All there are.
        ALL = 0x0001_ffdf;
    }
}

/// Bits of [`RCTL`] (13.4.22).
pub mod rctl {
    bits! {
        /// Receiver enable.
        EN = 1 << 1;
        /// Store bad packets.
        SBP = 1 << 2;
        /// Unicast promiscuous.
        UPE = 1 << 3;
        /// Multicast promiscuous.
        MPE = 1 << 4;
        /// Long packets.
        LPE = 1 << 5;
        /// Broadcast accept.
        BAM = 1 << 15;
        /// VLAN filter.
        VFE = 1 << 18;
        /// Buffer sizes are 16 times as large.
        BSEX = 1 << 25;
        /// The frame check sequence is stripped.
        SECRC = 1 << 26;
    }
    /// Position of the descriptor threshold.
    pub const RDMTS: u32 = 8;
    /// Position of the multicast offset.
    pub const MO: u32 = 12;
    /// Position of the buffer size.
    pub const BSIZE: u32 = 16;
}

/// Bits of [`TCTL`] (13.4.33).
pub mod tctl {
    bits! {
        /// Transmitter enable.
        EN = 1 << 1;
        /// Short packets are padded.
        PSP = 1 << 3;
    }
}

/// Bits of [`RDTR`] (13.4.30).
pub mod rdtr {
    bits! {
        /// Flush partial descriptors: the delay is over.
        FPD = 1 << 31;
    }
}

/// Bits of [`RXCSUM`] (13.4.31).
pub mod rxcsum {
    bits! {
        /// IP checksums are reported.
        IPOFL = 1 << 8;
        /// TCP and UDP checksums are reported.
        TUOFL = 1 << 9;
    }
}

/// Bits of the high word of a receive address (13.5.2).
pub mod rah {
    bits! {
        /// Address valid.
        AV = 1 << 31;
    }
}
