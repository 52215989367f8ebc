package geo

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Headers between proxies; dropped if a client sends them.
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
	RejectRecipient = "recipient" // sent to another proxy, or to an earlier process of this one
	RejectPeer      = "peer_not_allowed"
	RejectDeadline  = "deadline"
	RejectOwner     = "not_owner" // another proxy of the region owns the decode groups
)

var rejects = []string{
	RejectBusy, RejectDraining, RejectHop, RejectSignature, RejectStale, RejectModel, RejectVersion, RejectPeer, RejectDeadline, RejectOwner,
	RejectRecipient,
}

// Hop is the way of a request between proxies: the content of HopHeader.
type Hop struct {
	N        int      // proxies that have forwarded it
	Max      int      // proxies that may forward it
	Origin   string   // the client's proxy
	Via      []string // proxies that have forwarded it, in order
	RID      string   // its id at the origin
	Time     int64    // when it was sent, Unix ms
	Nonce    string   // 32 hex digits, never used twice
	Deadline int64    // Unix ms; then the sender no longer waits for the first event
	To       string   // id of the recipient; in a probe, of its entry in geo.peers
	Boot     string   // the recipient's process, by its last answer; empty in a probe
	Digest   string   // of the body, by DigestOf
}

const (
	maxHop  = 2 << 10 // bytes of a hop header
	maxName = 64      // bytes of a name of a proxy, request or tenant
	maxVia  = 8       // proxies in Via
)

// ErrHop is for a malformed hop header.
var ErrHop = errors.New("the hop header is not that of a proxy")

// ErrHopVersion is for another version. The version also says what a signature covers, so no other
// one is accepted.
var ErrHopVersion = errors.New("the hop header is of another version")

// hopVersion begins every hop header, and so it is signed.
const hopVersion = "v3"

// DigestOf is a SHA-256 in hex, for Hop.Digest.
func DigestOf(body ...[]byte) string {
	sum := sha256.New()
	for _, part := range body {
		_, _ = sum.Write(part) // never fails
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// String is the only text of the hop, so that ParseHop can refuse any other.
func (h *Hop) String() string {
	return hopVersion + ";n=" + strconv.Itoa(h.N) + ";max=" + strconv.Itoa(h.Max) + ";origin=" + h.Origin +
		";via=" + strings.Join(h.Via, ",") + ";rid=" + h.RID + ";ts=" + strconv.FormatInt(h.Time, 10) + ";nonce=" + h.Nonce +
		";deadline=" + strconv.FormatInt(h.Deadline, 10) + ";to=" + h.To + ";boot=" + h.Boot + ";body=" + h.Digest
}

// Sender is the last in Via, which ParseHop never leaves empty.
func (h *Hop) Sender() string { return h.Via[len(h.Via)-1] }

// ParseHop refuses any other form than String's: two readers can never understand a signed header
// in different ways.
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
		wrongName := p.err == nil && !ValidName(v) // after an error, results are not valid
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
	// A last separator would be another form of the same hop.
	if furtherField || strings.HasSuffix(text, ";") {
		p.err = fmt.Errorf("%w: there is something after the body", ErrHop)
	}
	if p.err != nil {
		return Hop{}, p.err
	}
	return h, nil
}

// hopParser reads fields one after the other. After an error its results are not valid.
type hopParser struct {
	rest string // not read yet
	err  error  // the first error
}

func (p *hopParser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = fmt.Errorf("%w: "+format, append([]any{ErrHop}, args...)...)
	}
}

func (p *hopParser) field(name string) string {
	var field string
	field, p.rest, _ = strings.Cut(p.rest, ";")
	value, ok := strings.CutPrefix(field, name+"=")
	if !ok {
		p.fail("%s is missing or not in its place", name)
	}
	return value
}

// number has only one form: no sign, no leading zeros.
func (p *hopParser) number(name string, limit int64) int64 {
	text := p.field(name)
	n, err := strconv.ParseInt(text, 10, 64)
	isInRange := err == nil && n >= 0 && n <= limit
	if !isInRange || strconv.FormatInt(n, 10) != text {
		p.fail("%s is no number from 0 to %d", name, limit)
	}
	return n
}

func (p *hopParser) name(name string) string {
	text := p.field(name)
	if !ValidName(text) {
		p.fail("%s is no name", name)
	}
	return text
}

// digits are lower-case hex.
func (p *hopParser) digits(name string, length int) string {
	text := p.field(name)
	if len(text) != length || strings.Trim(text, "0123456789abcdef") != "" {
		p.fail("%s is not %d hex digits", name, length)
	}
	return text
}

// maxMillis is in the year 5138, in Unix ms.
const maxMillis = 99_999_999_999_999

// ValidName is for headers, metrics and hash rings.
func ValidName(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z' // the bit 0x20 makes a letter small
		digit := c >= '0' && c <= '9'
		if !letter && !digit && strings.IndexByte("-._:/@", c) < 0 {
			return false
		}
	}
	return s != "" && len(s) <= maxName
}
