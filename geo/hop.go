package geo

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Headers between dispatchers. If a client sends them, they are dropped.
const (
	HopHeader       = "X-Evenkeel-Hop"
	TenantHeader    = "X-Evenkeel-Tenant"
	SignatureHeader = "X-Evenkeel-Signature"
	ServedByHeader  = "X-Evenkeel-Served-By"
	CachedHeader    = "X-Evenkeel-Cached-Tokens"
	RejectHeader    = "X-Evenkeel-Reject"
)

// What RejectHeader says.
const (
	RejectBusy      = "peer_busy"
	RejectDraining  = "draining"
	RejectHop       = "hop"
	RejectSignature = "signature"
	RejectStale     = "stale"
	RejectModel     = "model"
	RejectVersion   = "version"
	RejectRecipient = "recipient" // it was sent to another dispatcher, or to an earlier run of this one
	RejectPeer      = "peer_not_allowed"
	RejectDeadline  = "deadline"
	RejectOwner     = "not_owner" // another dispatcher of the region owns the request's decode groups
)

var rejects = []string{
	RejectBusy, RejectDraining, RejectHop, RejectSignature, RejectStale, RejectModel, RejectVersion, RejectPeer, RejectDeadline, RejectOwner,
	RejectRecipient,
}

// Hop describes the way of a forwarded request so far.
type Hop struct {
	N        int      // how many dispatchers have forwarded the request
	Max      int      // how many may forward it
	Origin   string   // the dispatcher that the client sent it to
	Via      []string // the dispatchers that have forwarded it, the oldest first
	RID      string   // the request's id at the origin
	Time     int64    // when it was sent, Unix ms
	Nonce    string   // 32 hex digits, never used twice
	Deadline int64    // Unix ms; after it, the sender does not wait for the first event
	To       string   // the id of the dispatcher that the request is sent to; in a probe, its id under geo.peers
	Boot     string   // the recipient's run of the process, as its last probe reported it; empty in a probe
	Digest   string   // the digest of the body, by DigestOf
}

const (
	maxHop  = 2 << 10 // bytes of the header
	maxName = 64      // bytes of the name of a dispatcher, request or tenant
	maxVia  = 8
)

// ErrHop says that a hop header is malformed.
var ErrHop = errors.New("the hop header is not that of a proxy")

// ErrHopVersion says that a hop header is of another version. The first version
// named no recipient and signed the body itself, so a recorded request could be
// sent again to another dispatcher.
var ErrHopVersion = errors.New("the hop header is of another version")

// hopVersion begins every header and every text that is signed.
const hopVersion = "v2"

// DigestOf returns the SHA-256 of a request's body in hex, by which a hop names the body.
func DigestOf(body ...[]byte) string {
	sum := sha256.New()
	for _, part := range body {
		_, _ = sum.Write(part) // never fails, by its documentation
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// String writes the header. There is exactly one way to write a hop.
func (h *Hop) String() string {
	return hopVersion + ";n=" + strconv.Itoa(h.N) + ";max=" + strconv.Itoa(h.Max) + ";origin=" + h.Origin + ";via=" + h.via() +
		";rid=" + h.RID + ";ts=" + strconv.FormatInt(h.Time, 10) + ";nonce=" + h.Nonce + ";deadline=" + strconv.FormatInt(h.Deadline, 10) +
		";to=" + h.To + ";boot=" + h.Boot + ";body=" + h.Digest
}

func (h *Hop) via() string { return strings.Join(h.Via, ",") }

// Sender is the dispatcher that sent the request here.
func (h *Hop) Sender() string { return h.Via[len(h.Via)-1] }

// ParseHop reads the header exactly as String writes it, and refuses any other form, so that
// no two readers can understand a signed header differently.
func ParseHop(text string) (Hop, error) {
	var h Hop
	if len(text) > maxHop {
		return h, fmt.Errorf("%w: over %d bytes", ErrHop, maxHop)
	}
	rest, ok := strings.CutPrefix(text, hopVersion+";")
	if !ok {
		if len(text) > 2 && text[0] == 'v' && text[1] >= '0' && text[1] <= '9' && text[2] == ';' {
			return h, fmt.Errorf("%w: %s and not %s; run the same version of evenkeel on both sides", ErrHopVersion, text[:2], hopVersion)
		}
		return h, fmt.Errorf("%w: it does not begin with %s", ErrHop, hopVersion)
	}
	var err error
	field := func(name string) string {
		var value string
		value, rest, _ = strings.Cut(rest, ";")
		v, ok := strings.CutPrefix(value, name+"=")
		if !ok && err == nil {
			err = fmt.Errorf("%w: %s is missing or not in its place", ErrHop, name)
		}
		return v
	}
	number := func(name string, limit int64) int64 {
		text := field(name)
		n, parseErr := strconv.ParseInt(text, 10, 64)
		if err == nil && (parseErr != nil || n < 0 || n > limit || strconv.FormatInt(n, 10) != text) {
			err = fmt.Errorf("%w: %s is no number from 0 to %d", ErrHop, name, limit)
		}
		return n
	}
	name := func(name string) string {
		text := field(name)
		if err == nil && !ValidName(text) {
			err = fmt.Errorf("%w: %s is no name", ErrHop, name)
		}
		return text
	}
	h.N, h.Max = int(number("n", 99)), int(number("max", 99))
	h.Origin = name("origin")
	h.Via = strings.SplitN(field("via"), ",", maxVia+1)
	for _, v := range h.Via {
		if err == nil && !ValidName(v) || len(h.Via) > maxVia {
			err = fmt.Errorf("%w: via is no list of up to %d names", ErrHop, maxVia)
		}
	}
	h.RID = name("rid")
	h.Time = number("ts", maxMillis)
	digits := func(name string, n int) string {
		text := field(name)
		if err == nil && (len(text) != n || strings.Trim(text, "0123456789abcdef") != "") {
			err = fmt.Errorf("%w: %s is not %d hex digits", ErrHop, name, n)
		}
		return text
	}
	h.Nonce = digits("nonce", 32)
	h.Deadline = number("deadline", maxMillis)
	h.To = name("to")
	if h.Boot = field("boot"); err == nil && h.Boot != "" && !ValidName(h.Boot) {
		err = fmt.Errorf("%w: boot is no name", ErrHop)
	}
	h.Digest = digits("body", 2*sha256.Size)
	if err == nil && rest != "" || strings.HasSuffix(text, ";") {
		err = fmt.Errorf("%w: there is something after the body", ErrHop)
	}
	if err != nil {
		return Hop{}, err
	}
	return h, nil
}

// maxMillis is the year 5138: any later time is nonsense.
const maxMillis = 99_999_999_999_999

// ValidName says whether a name may stand in headers, metrics and hash rings.
func ValidName(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		digit := c >= '0' && c <= '9'
		if !letter && !digit && strings.IndexByte("-._:/@", c) < 0 {
			return false
		}
	}
	return s != "" && len(s) <= maxName
}
