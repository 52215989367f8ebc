package geo

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"evenkeel/engine"
)

// Keys sign hops and check signatures: the first signs, all are accepted. To replace a key, put the
// new one second on all proxies, then first, and then remove the old one.
type Keys struct{ all []key }

type key struct {
	id     string
	secret []byte
}

const (
	minKey  = 32 // bytes
	maxKeys = 2
)

// ErrKeys is for keys that cannot be used.
var ErrKeys = errors.New("the keys between proxies cannot be used")

// ParseKeys reads one key per line: id, space, at least 32 bytes without spaces. It skips empty
// lines and those that begin with #. Errors never contain a key.
func ParseKeys(text string) (*Keys, error) {
	keys := &Keys{}
	n := 0 // of the line, for errors
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		switch {
		case len(fields) != 2:
			return nil, fmt.Errorf("%w: line %d; write the key's id, a space and the key", ErrKeys, n)
		case !ValidName(fields[0]) || strings.ContainsAny(fields[0], ";="):
			return nil, fmt.Errorf("%w: line %d: the key's id; write letters and digits", ErrKeys, n)
		case len(fields[1]) < minKey:
			return nil, fmt.Errorf("%w: line %d: key %s has %d bytes; write at least %d, such as openssl rand -hex 32 makes", ErrKeys, n,
				fields[0], len(fields[1]), minKey)
		case len(keys.all) == 1 && keys.all[0].id == fields[0]:
			return nil, fmt.Errorf("%w: line %d: a second key %s; give it another id", ErrKeys, n, fields[0])
		case len(keys.all) == maxKeys:
			return nil, fmt.Errorf("%w: line %d: a third key; %d are enough to change one", ErrKeys, n, maxKeys)
		}
		keys.all = append(keys.all, key{fields[0], []byte(fields[1])})
	}
	if len(keys.all) == 0 {
		return nil, fmt.Errorf("%w: there is none; write one line with an id, a space and a key", ErrKeys)
	}
	return keys, nil
}

// A Message has the parts of a request that a signature covers in addition to the hop. The hop
// contains a digest of the body, so that the signature can be checked before the body is read.
type Message struct {
	Method, Target string          // Target is the path with its query
	Headers        []engine.Header // the request's headers in any order; those that are not Covered may be left out
}

// Covered says that the signature covers a header: all by which a proxy decides how it serves a
// request, and those that later versions may add. Trace headers are left out, because a service
// mesh may write its own spans into them.
func Covered(name string) bool {
	const prefix = "X-Evenkeel-"
	// The hop itself is signed.
	return strings.HasPrefix(name, prefix) && name != HopHeader && name != SignatureHeader ||
		name == "Content-Encoding" // the digest is of the body before decoding
}

// text is what is signed: method, target, hop, and each Covered header, sorted by name. Each part's
// length stands before it, so that two requests never have the same text. A missing header differs
// from an empty one.
func (m *Message) text(h *Hop) []byte {
	covered := make([]engine.Header, 0, 8) // a proxy sends fewer
	for _, header := range m.Headers {
		if Covered(header.Name) {
			covered = append(covered, header)
		}
	}
	slices.SortStableFunc(covered, func(a, b engine.Header) int { return strings.Compare(a.Name, b.Name) })
	text := make([]byte, 0, 1<<10) // usually enough
	for _, part := range [...]string{m.Method, m.Target, h.String()} {
		text = appendPart(text, part)
	}
	for _, header := range covered {
		text = appendPart(appendPart(text, header.Name), header.Value)
	}
	return text
}

func appendPart(text []byte, part string) []byte {
	text = strconv.AppendInt(text, int64(len(part)), 10)
	text = append(text, ':')
	return append(text, part...)
}

func (k *key) sum(m *Message, h *Hop) []byte {
	mac := hmac.New(sha256.New, k.secret)
	_, _ = mac.Write(m.text(h)) // never fails
	return mac.Sum(nil)
}

// Sign returns the value of SignatureHeader.
func (k *Keys) Sign(m *Message, h *Hop) string {
	first := &k.all[0]
	return "kid=" + first.id + ";v1=" + hex.EncodeToString(first.sum(m, h))
}

// Signed compares in constant time, so that the time does not show which byte is wrong.
func (k *Keys) Signed(header string, m *Message, h *Hop) bool {
	id, sum, hasSum := strings.Cut(strings.TrimPrefix(header, "kid="), ";v1=")
	given, err := hex.DecodeString(sum)
	wellFormed := hasSum && err == nil && strings.HasPrefix(header, "kid=")
	lowerCase := hex.EncodeToString(given) == sum // a signature has only one form
	if !wellFormed || !lowerCase {
		return false
	}
	for i := range k.all {
		if known := &k.all[i]; known.id == id {
			return hmac.Equal(given, known.sum(m, h))
		}
	}
	return false
}
