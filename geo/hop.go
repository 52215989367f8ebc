package geo

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Headers between proxies. They are dropped if a client sends them.
const (
	HopHeader       = "X-Evenkeel-Hop"
	TenantHeader    = "X-Evenkeel-Tenant"
	SignatureHeader = "X-Evenkeel-Signature"
	ServedByHeader  = "X-Evenkeel-Served-By"
	CachedHeader    = "X-Evenkeel-Cached-Tokens"
	RejectHeader    = "X-Evenkeel-Reject"
)

// The values of RejectHeader.
const (
	RejectBusy      = "peer_busy"
	RejectDraining  = "draining"
	RejectHop       = "hop"
	RejectSignature = "signature"
	RejectStale     = "stale"
	RejectModel     = "model"
	RejectVersion   = "version"
	RejectRecipient = "recipient" // the request was sent to another proxy, or to an earlier process of this one
	RejectPeer      = "peer_not_allowed"
	RejectDeadline  = "deadline"
	RejectOwner     = "not_owner" // another proxy of the region owns the request's decode groups
)

var rejects = []string{
	RejectBusy, RejectDraining, RejectHop, RejectSignature, RejectStale, RejectModel, RejectVersion, RejectPeer, RejectDeadline, RejectOwner,
	RejectRecipient,
}

// Hop describes the way of a request between proxies: it is the content of HopHeader.
type Hop struct {
	N        int      // number of proxies that have forwarded the request
	Max      int      // number of proxies that may forward it
	Origin   string   // the proxy to which the client sent the request
	Via      []string // the proxies that have forwarded the request, the first one first
	RID      string   // the request's id at the origin
	Time     int64    // when the request was sent, Unix ms
	Nonce    string   // 32 hex digits, never used twice
	Deadline int64    // Unix ms; after it, the sender no longer waits for the first event
	To       string   // id of the proxy to which the request is sent; in a probe, the id of its entry in geo.peers
	Boot     string   // name of the recipient's process, from the recipient's last answer to a probe; empty in a probe
	Digest   string   // the digest of the body, by DigestOf
}

const (
	maxHop  = 2 << 10 // largest size of a hop header, in bytes
	maxName = 64      // longest name of a proxy, request or tenant, in bytes
	maxVia  = 8       // most proxies in Via
)

// ErrHop is the error for a malformed hop header.
var ErrHop = errors.New("the hop header is not that of a proxy")

// ErrHopVersion is the error for a hop header of another version. The version also says what a signature covers, so a proxy accepts no
// other version.
var ErrHopVersion = errors.New("the hop header is of another version")

// hopVersion is the begin of every hop header, and so it is signed.
const hopVersion = "v3"

// DigestOf returns the SHA-256 of a request's body in hex, for Hop.Digest.
func DigestOf(body ...[]byte) string {
	sum := sha256.New()
	for _, part := range body {
		_, _ = sum.Write(part) // Write of a hash.Hash never returns an error
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// String returns the hop as the text of HopHeader. Each hop has exactly one such text, so that ParseHop can refuse any other.
func (h *Hop) String() string {
	return hopVersion + ";n=" + strconv.Itoa(h.N) + ";max=" + strconv.Itoa(h.Max) + ";origin=" + h.Origin +
		";via=" + strings.Join(h.Via, ",") + ";rid=" + h.RID + ";ts=" + strconv.FormatInt(h.Time, 10) + ";nonce=" + h.Nonce +
		";deadline=" + strconv.FormatInt(h.Deadline, 10) + ";to=" + h.To + ";boot=" + h.Boot + ";body=" + h.Digest
}

// Sender is the proxy that sent the request here: the last one in Via, which ParseHop never leaves empty.
func (h *Hop) Sender() string { return h.Via[len(h.Via)-1] }

// ParseHop parses the form that String returns, and refuses any other form. Two readers can therefore never understand a
// signed header in different ways.
func ParseHop(text string) (Hop, error) {
	var h Hop
	if len(text) > maxHop {
		return h, fmt.Errorf("%w: over %d bytes", ErrHop, maxHop)
	}
	fields, ok := strings.CutPrefix(text, hopVersion+";")
	if !ok {
		otherVersion := len(text) > 2 && text[0] == 'v' && text[1] >= '0' && text[1] <= '9' && text[2] == ';'
		if otherVersion {
			return h, fmt.Errorf("%w: %s and not %s; run the same version of evenkeel on both sides", ErrHopVersion, text[:2], hopVersion)
		}
		return h, fmt.Errorf("%w: it does not begin with %s", ErrHop, hopVersion)
	}
	p := hopParser{rest: fields}
	h.N, h.Max = int(p.number("n", 99)), int(p.number("max", 99))
	h.Origin = p.name("origin")
	h.Via = strings.SplitN(p.field("via"), ",", maxVia+1)
	tooMany := len(h.Via) > maxVia
	for _, v := range h.Via {
		wrongName := p.err == nil && !ValidName(v) // after an error, the parser's results are not valid
		if wrongName || tooMany {
			p.err = fmt.Errorf("%w: via is no list of up to %d names", ErrHop, maxVia)
		}
	}
	h.RID = p.name("rid")
	h.Time = p.number("ts", maxMillis)
	h.Nonce = p.digits("nonce", 32)
	h.Deadline = p.number("deadline", maxMillis)
	h.To = p.name("to")
	if h.Boot = p.field("boot"); h.Boot != "" && !ValidName(h.Boot) {
		p.fail("boot is no name")
	}
	h.Digest = p.digits("body", 2*sha256.Size)
	furtherField := p.err == nil && p.rest != ""
	if furtherField || strings.HasSuffix(text, ";") { // a last separator leaves no rest, but would be another form of the same hop
		p.err = fmt.Errorf("%w: there is something after the body", ErrHop)
	}
	if p.err != nil {
		return Hop{}, p.err
	}
	return h, nil
}

// hopParser reads the fields of a hop header one after the other. After an error its results are not valid.
type hopParser struct {
	rest string // the fields that were not read yet
	err  error  // the first error
}

// fail sets err, unless an earlier field has set it.
func (p *hopParser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf("%w: "+format, append([]any{ErrHop}, args...)...)
	}
}

// field reads the next field, which must have this name, and returns its value.
func (p *hopParser) field(name string) string {
	var field string
	field, p.rest, _ = strings.Cut(p.rest, ";")
	value, ok := strings.CutPrefix(field, name+"=")
	if !ok {
		p.fail("%s is missing or not in its place", name)
	}
	return value
}

// number reads a decimal number from 0 to limit in its only form: without a sign or leading zeros.
func (p *hopParser) number(name string, limit int64) int64 {
	text := p.field(name)
	n, err := strconv.ParseInt(text, 10, 64)
	isInRange := err == nil && n >= 0 && n <= limit
	if !isInRange || strconv.FormatInt(n, 10) != text { // the number has only one form
		p.fail("%s is no number from 0 to %d", name, limit)
	}
	return n
}

// name reads a field that must be a ValidName.
func (p *hopParser) name(name string) string {
	text := p.field(name)
	if !ValidName(text) {
		p.fail("%s is no name", name)
	}
	return text
}

// digits reads a field of exactly length lower-case hex digits.
func (p *hopParser) digits(name string, length int) string {
	text := p.field(name)
	if len(text) != length || strings.Trim(text, "0123456789abcdef") != "" {
		p.fail("%s is not %d hex digits", name, length)
	}
	return text
}

// maxMillis is a time in the year 5138, in Unix ms; later times are refused.
const maxMillis = 99_999_999_999_999

// ValidName reports whether a name is allowed in headers, metrics and hash rings.
func ValidName(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z' // the bit 0x20 makes a capital letter a small one
		digit := c >= '0' && c <= '9'
		if !letter && !digit && strings.IndexByte("-._:/@", c) < 0 {
			return false
		}
	}
	return s != "" && len(s) <= maxName
}
