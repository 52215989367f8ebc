package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	randv2 "math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"evenkeel/bench/lab/load"
	"evenkeel/geo"
)

// strangers are callers without a key, callers with a key that want everything
// for themselves, and machines that say they are another region's proxy. They
// attack the sockets, one after another, until they are stopped.
type strangers struct {
	p *proxy
	*actions
}

// attackers run at once. Each pauses between two attacks, so that the machine is
// not the one that is attacked.
const (
	attackers   = 24
	attackEvery = 20 * time.Millisecond
	holdTime    = 2 * time.Second // of connections that are kept open
	attackTime  = 5 * time.Second // of any other
	largest     = 32 << 20        // bytes of a body that is taken
)

// attack is the load that they are.
func (s *strangers) attack(seed uint64) load.Config {
	one := func(ctx context.Context, _ string, i int) (load.Kind, string) {
		if !pause(ctx, attackEvery) {
			return load.Stopped, ""
		}
		rng := randv2.New(randv2.NewPCG(seed, 3000<<32+uint64(i)))
		a := attacks[rng.IntN(len(attacks))]
		a.run(s, ctx, rng)
		s.count(a.name)
		return load.OK, ""
	}
	return load.Config{URLs: []string{s.p.URL()}, Concurrency: attackers, Own: one}
}

// attacks are all kinds of attack. Bodies are announced or broken off rather than
// sent, because what they cost the proxy is what counts.
var attacks = []struct {
	name string
	run  func(s *strangers, ctx context.Context, rng *randv2.Rand)
}{
	{"uploads broken off", func(s *strangers, _ context.Context, rng *randv2.Rand) {
		whole := s.post(greedy.key()) + "Transfer-Encoding: chunked\r\n\r\n1000\r\n" + strings.Repeat("x", 4096) +
			"\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n"
		s.send(whole[:rng.IntN(len(whole))], func(c *net.TCPConn) {
			switch rng.IntN(3) {
			case 0:
				_ = c.CloseWrite()
				_, _ = io.Copy(io.Discard, c)
			case 1:
				_ = c.SetLinger(0)
			}
		})
	}},
	{"uploads that announce much", func(s *strangers, ctx context.Context, _ *randv2.Rand) {
		s.hold(ctx, s.p.Clients, 64, s.post(greedy.key())+fmt.Sprintf("Content-Length: %d\r\n\r\nhello", largest))
	}},
	{"uploads that stop half-way", func(s *strangers, ctx context.Context, _ *randv2.Rand) {
		s.hold(ctx, s.p.Clients, 8, s.post(greedy.key())+fmt.Sprintf("Content-Length: %d\r\n\r\n%s", 2<<20, strings.Repeat("x", 1<<20)))
	}},
	{"uploads without a key", func(s *strangers, ctx context.Context, rng *randv2.Rand) {
		framing := []string{fmt.Sprintf("Content-Length: %d\r\n\r\nhello", largest),
			"Transfer-Encoding: chunked\r\n\r\n100000\r\nhello"}[rng.IntN(2)]
		s.hold(ctx, s.p.Clients, 16, s.post("nobody")+framing)
	}},
	{"uploads that wait for 100 Continue", func(s *strangers, _ context.Context, rng *randv2.Rand) {
		s.send(s.post([]string{"nobody", greedy.key()}[rng.IntN(2)])+fmt.Sprintf("Expect: 100-continue\r\nContent-Length: %d\r\n\r\n",
			largest+rng.IntN(2)), answered)
	}},
	{"bodies too large", func(s *strangers, _ context.Context, _ *randv2.Rand) {
		s.send(s.post(greedy.key())+fmt.Sprintf("Transfer-Encoding: chunked\r\n\r\n%x\r\nhello", largest+1), answered)
	}},
	{"requests that read in two ways", func(s *strangers, _ context.Context, rng *randv2.Rand) {
		chunked := "Transfer-Encoding: chunked\r\n\r\n"
		s.send(s.post(greedy.key())+[]string{
			"Transfer-Encoding: identity\r\n\r\n", "Authorization: Bearer " + callers[0].key() + "\r\nContent-Length: 0\r\n\r\n",
			"Content-Length: 5\r\n" + chunked + "0\r\n\r\n",
			chunked + "0\r\nX : y\r\n\r\n", chunked + "0\r\nX: y\n\r\n", chunked + "0\r\nX: y\r\n z\r\n\r\n", chunked +
				"5;a\x00b\r\nhello\r\n0\r\n\r\n",
			chunked + "5;" + strings.Repeat("x", 60_000) + "\r\n", chunked + strings.Repeat("1;"+strings.Repeat("x", 200)+"\r\na\r\n", 500),
		}[rng.IntN(9)], answered)
	}},
	{"scores that would end an engine of SGLang", func(s *strangers, _ context.Context, rng *randv2.Rand) {
		path, body := []string{"/v1/score", "/v1/rerank", "/v1/embeddings"}[rng.IntN(3)], fmt.Sprintf(`{"model":%q,"query":"a","items":["b"],"documents":["b"],"input":"a"}`, model)
		s.send(fmt.Sprintf("POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer %s\r\nContent-Length: "+
			"%d\r\n\r\n%s", path, greedy.key(), len(body), body), answered)
	}},
	{"heads that drip", func(s *strangers, ctx context.Context, _ *randv2.Rand) {
		s.hold(ctx, s.p.Clients, 16, "POST /v1/completions HTTP/1.1\r\nHost: a\r\nX: ")
	}},
	{"lists of models", func(s *strangers, _ context.Context, rng *randv2.Rand) {
		key := []string{"nobody", greedy.key()}[rng.IntN(2)]
		s.send(strings.Repeat("GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer "+key+"\r\n\r\n", 50), nil)
	}},
	{"forged heads of a peer", func(s *strangers, ctx context.Context, _ *randv2.Rand) {
		s.hold(ctx, s.p.Peers, 16, s.forged()+fmt.Sprintf("Content-Length: %d\r\n\r\n%s", largest, strings.Repeat("x", 64<<10)))
	}},
}

func (s *strangers) post(key string) string {
	return "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nAuthorization: Bearer " + key + "\r\n"
}

// forged is the head of a request that the peer might have sent, signed with a
// key that has the right name alone.
func (s *strangers) forged() string {
	var nonce [16]byte
	_, _ = rand.Read(nonce[:])
	now := time.Now()
	h := geo.Hop{
		N: 1, Max: 1, Origin: otherRegion, Via: []string{otherRegion}, RID: "r", Time: now.UnixMilli(), Nonce: hex.EncodeToString(nonce[:]),
		Deadline: now.Add(time.Minute).UnixMilli(), To: thisRegion, Boot: "b", Digest: geo.DigestOf(nil),
	}
	keys, err := geo.ParseKeys(hopKeyName + " another-key-of-at-least-32-bytes\n")
	if err != nil {
		panic(err) // it is our own text
	}
	const path = "/v1/completions"
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: a\r\n%s: %s\r\n%s: %s\r\n", path, geo.HopHeader, h.String(),
		geo.SignatureHeader, keys.Sign(&geo.Message{Method: http.MethodPost, Target: path}, &h))
}

// send sends text on a connection of its own and then does the rest. It does not
// look at the proxy's answer: the load of the other key shows the effect.
func (s *strangers) send(text string, then func(*net.TCPConn)) {
	if c := s.open(s.p.Clients, text); c != nil {
		if then != nil {
			then(c)
		}
		_ = c.Close()
	}
}

// answered waits for the first bytes of the proxy's answer.
func answered(c *net.TCPConn) { _, _ = c.Read(make([]byte, 4096)) }

// hold sends the same on n connections and keeps them open as long as it may.
func (s *strangers) hold(ctx context.Context, addr string, n int, text string) {
	for range n {
		if c := s.open(addr, text); c != nil {
			defer func() { _ = c.Close() }()
		}
	}
	pause(ctx, holdTime)
}

func (s *strangers) open(addr, text string) *net.TCPConn {
	c, err := net.DialTimeout("tcp", addr, attackTime)
	if err != nil {
		return nil // the listener's own limits are a defence, too
	}
	_ = c.SetDeadline(time.Now().Add(attackTime))
	_, _ = io.WriteString(c, text)
	return c.(*net.TCPConn)
}
