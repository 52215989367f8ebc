package engine

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"
)

// Target is an engine or a rank of it. It must not change while calls use it.
type Target struct {
	ID     string   // in errors, logs and metrics
	URL    *url.URL // its path is a prefix of every call's path
	Rank   int      // for the header X-data-parallel-rank; -1: no header is sent
	First  int      // the engine's number of rank 0; the header has First + Rank
	APIKey string   // sent as a bearer token; empty: none is sent
	TLS    *tls.Config
}

// Unranked is for requests whose body names the rank.
func (t *Target) Unranked() *Target {
	u := *t
	u.Rank = -1
	return &u
}

// Header is one request header. The list reserved has those that a caller cannot set.
type Header struct{ Name, Value string }

// RequestID is the header that names a request in the logs of engines.
const RequestID = "X-Request-Id"

// JSONHeaders are of a request with a JSON body and this id.
func JSONHeaders(id string) []Header {
	return []Header{{Name: "Content-Type", Value: "application/json"}, {Name: RequestID, Value: id}}
}

// Deadlines bound the phases of a call; zero: no bound. The whole call has none, because a healthy
// stream may run for an hour.
type Deadlines struct {
	Connect   time.Duration // name lookup, TCP and TLS together
	FirstByte time.Duration // from the connection to the end of the response head
	Idle      time.Duration // of one read of the body; see Response.SetIdle
}

// Validate returns an error if calls to the target can never work.
func (t *Target) Validate() error {
	if err := t.check(); err != nil {
		return fmt.Errorf("engine %s: %w", t.ID, err)
	}
	return nil
}

// check also refuses bytes that could end a line of the request's head early.
func (t *Target) check() error {
	switch {
	case t.URL == nil || t.URL.Host == "" || t.URL.Hostname() == "":
		return fmt.Errorf("%w: the target has no host; give a URL such as http://10.0.0.5:8000", ErrRefused)
	case t.URL.Scheme != "http" && t.URL.Scheme != "https":
		return fmt.Errorf("%w: scheme %q; only http and https are spoken", ErrRefused, t.URL.Scheme)
	case t.URL.User != nil:
		return fmt.Errorf("%w: credentials in a URL end up in logs; set the API key instead", ErrRefused)
	case t.URL.RawQuery != "" || t.URL.Fragment != "":
		return fmt.Errorf("%w: the target's URL must end with its path", ErrRefused)
	case !isVisible(t.URL.Host) || !isVisible(t.URL.EscapedPath()):
		return fmt.Errorf("%w: control or non-ASCII characters in the target's URL", ErrRefused)
	case !isVisible(t.APIKey):
		return fmt.Errorf("%w: spaces, control or non-ASCII characters in the API key", ErrRefused)
	}
	return nil
}

// key identifies the connections that a call may use: two calls with equal keys can share them.
type key struct {
	https bool
	host  string // host and port as in the URL
	tls   *tls.Config
}

func (t *Target) key() key {
	return key{https: t.URL.Scheme == "https", host: t.URL.Host, tls: t.TLS}
}

// address keeps the zone of an IPv6 address.
func (t *Target) address() string {
	port := t.URL.Port()
	if port == "" {
		port = "80"
		if t.URL.Scheme == "https" {
			port = "443"
		}
	}
	return net.JoinHostPort(t.URL.Hostname(), port)
}

// hostHeader leaves out an IPv6 zone, which has a meaning only on this machine (RFC 6874).
func (t *Target) hostHeader() string {
	zone := strings.IndexByte(t.URL.Host, '%')
	if zone < 0 {
		return t.URL.Host
	}
	end := strings.LastIndexByte(t.URL.Host, ']') // the zone is between the % and this bracket
	// The host is no IPv6 address in brackets, so the % begins no zone.
	if end < zone {
		return t.URL.Host
	}
	return t.URL.Host[:zone] + t.URL.Host[end:]
}

// tlsConfig offers only HTTP/1.1, because this client has no HTTP/2.
func (t *Target) tlsConfig() *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.TLS != nil {
		c = t.TLS.Clone()
	}
	if c.ServerName == "" { // tls.Client cannot take the name from the address
		name, _, _ := strings.Cut(t.URL.Hostname(), "%") // a certificate has no IPv6 zone
		c.ServerName = name
	}
	c.NextProtos = []string{"http/1.1"}
	return c
}

func isVisible(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}

// Instance is one engine process: one URL, with any number of DP ranks.
type Instance struct {
	ID     string
	Role   string // a label of metrics
	Target *Target
	Slots  int // that a rank runs at once; 0: unknown
	// Ready is a path that answers at once whether the engine takes requests. It is set if GET /health
	// makes the engine compute.
	Ready string

	Ranks   int    // in the config; 0 counts as 1
	Version string // path; empty: /version
	// Canaries are the ranks that get a request for one token if it is doubtful whether the engine
	// computes; empty: none is sent.
	Canaries []*Target
	// Canary makes the body of a canary, which names the rank; nil: a plain completion, where a header
	// names the rank.
	Canary func(model string, rank int) []byte
	// Held is set while an operator has stopped requests. Then the engine is down only if no
	// connection can be made, or if it refuses the API key.
	Held *Held
}

// Held is why an operator has stopped requests. It is an error, as all reasons in a Status are.
type Held struct{ Why string }

func (h *Held) Error() string { return h.Why }

// sameSettings says whether the watch can continue. Monitor.Set changes Slots, Canary and Held in a
// watch that continues.
func (in Instance) sameSettings(other Instance) bool {
	a, b := in.Target, other.Target
	sameTarget := a == b || a.URL.String() == b.URL.String() && a.APIKey == b.APIKey && a.Rank == b.Rank && a.TLS == b.TLS
	sameCanaries := slices.EqualFunc(in.Canaries, other.Canaries, func(a, b *Target) bool { return a.Rank == b.Rank && a.First == b.First })
	return sameTarget && sameCanaries && in.Role == other.Role && in.Ranks == other.Ranks && in.Ready == other.Ready &&
		in.Version == other.Version
}
