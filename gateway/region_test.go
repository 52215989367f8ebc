package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/refengine/heldport"
	"evenkeel/gateway/config"
	"evenkeel/gateway/tracing/tracetest"
	"evenkeel/geo"
)

const geoKey = "a 0123456789abcdef0123456789abcdef\n"

// region makes a config that of a dispatcher with peers, id and address each,
// who sign with one key.
func region(t *testing.T, cfg *config.Config, id, listen string, peers ...string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(file, []byte(geoKey), 0o600))
	g := &cfg.Geo
	g.Mode, g.Listen, g.HMAC.KeysFile = geo.Distributed, listen, file
	g.Self = geo.Self{ID: id, Region: id[:2]}
	g.Probe.Interval = 2 * time.Second // a peer that a busy machine keeps from answering for three of them is stale
	for i := 0; i+1 < len(peers); i += 2 {
		g.Peers = append(g.Peers, geo.PeerConfig{ID: peers[i], Region: peers[i][:2], URL: "http://" + peers[i+1], PriceOut: 0.02, PriceIn: 0.05})
	}
}

// freePorts are addresses at which nobody listens. While the test runs, the
// kernel gives them to nobody else.
func freePorts(t *testing.T, n int) (addresses []string) {
	t.Helper()
	for range n {
		at, held, err := heldport.Reserve("127.0.0.1:0")
		require.NoError(t, err)
		if held == nil { // the system cannot hold a port
			ln, err := net.Listen("tcp", at)
			require.NoError(t, err)
			at = ln.Addr().String()
			require.NoError(t, ln.Close())
		} else {
			t.Cleanup(func() { _ = held.Close() })
		}
		addresses = append(addresses, at)
	}
	return addresses
}

// pair is two regions that know each other: us-1, to which clients come, and
// eu-1. Clients' requests go to eu-1 where that is said.
func pair(t *testing.T, us, eu options) (*cluster, *cluster) {
	t.Helper()
	at := freePorts(t, 2)
	withRegion := func(o options, id string, peers ...string) options {
		more := o.configure
		o.configure = func(cfg *config.Config) {
			region(t, cfg, id, map[string]string{"us-1": at[0], "eu-1": at[1]}[id], peers...)
			if more != nil {
				more(cfg)
			}
		}
		return o
	}
	b := start(t, withRegion(eu, "eu-1", "us-1", at[0]))
	a := start(t, withRegion(us, "us-1", "eu-1", at[1]))
	a.reaches("eu-1")
	a.hasEngines()
	b.hasEngines()
	return a, b
}

// hasEngines waits until the region could serve by itself: it is ready as soon
// as another one could.
func (c *cluster) hasEngines() {
	c.Helper()
	c.Eventually("its own engines are up", func() bool {
		if c.Metric(`evenkeel_prefill_candidates{state="open"}`) == 0 {
			return false
		}
		for _, m := range c.gw.Status(context.Background()).Dispatch.Models {
			for _, w := range m.Workers {
				if w.Up {
					return true
				}
			}
		}
		return false
	})
}

func (c *cluster) availability(peer string) string {
	for _, p := range c.gw.Geo().Status().Peers {
		if p.ID == peer {
			return p.Available[model]
		}
	}
	return ""
}

// reaches waits until a peer may get requests. One that a busy machine has kept from answering for
// a while may not.
func (c *cluster) reaches(peer string) {
	c.Helper()
	c.Eventually(peer+" is available", func() bool { return c.availability(peer) == "available" })
}

func (c *cluster) receipts() []geo.Receipt { return c.gw.Geo().Receipts(100) }

// remote has every request of a client forwarded, as long as the peer takes it.
func remote(cfg *config.Config) {
	cfg.Geo.Mode, cfg.Geo.Central = geo.Central, "eu-1"
}

var varying = regexp.MustCompile(`"(id|created)":("[^"]*"|\d+)`)

func constant(body string) string { return varying.ReplaceAllString(body, `"$1":0`) }

// All that a client sends to us-1 goes to eu-1, one test after the other.
func TestForwardsToAnotherRegion(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys")
	other := "b " + strings.Repeat("b", 32) + "\n"
	require.NoError(t, os.WriteFile(file, []byte(other+geoKey), 0o600))
	col := tracetest.Start(t)
	us, eu := pair(t, options{configure: traced(col, remote)}, options{configure: traced(col, func(cfg *config.Config) {
		cfg.Geo.Policy, cfg.Geo.HMAC.KeysFile, cfg.Tracing.Sample = "local-only", file, 0
	})})
	t.Run("keys are read again", func(t *testing.T) {
		require.NoError(t, os.WriteFile(file, []byte(other), 0o600))
		us.Eventually("it is not believed any more", func() bool { return strings.Contains(us.gw.Geo().Status().Peers[0].Fault, "signature") })
		require.NoError(t, os.WriteFile(file, []byte(other+geoKey), 0o600))
		us.Eventually("it is again", func() bool {
			return us.gw.Geo().Status().Peers[0].Fault == "" && us.availability("eu-1") == "available"
		})
	})
	t.Run("a forwarded answer is the local one byte for byte", func(t *testing.T) {
		for name, body := range map[string]string{
			"a stream":                 chat("one two three", `"stream":true,`),
			"a stream with its usage":  chat("four five", `"stream":true,"stream_options":{"include_usage":true},`),
			"a completion":             completion("six seven", `"stream":true,"max_tokens":20,`),
			"an answer in one piece":   chat("eight nine", ""),
			"a refusal of the request": chat("ten", `"temperature":"hot",`),
		} {
			path := "/v1/chat/completions"
			if strings.Contains(body, `"prompt"`) {
				path = "/v1/completions"
			}
			us.reaches("eu-1")
			local, forwarded := eu.Post(path, body), us.Post(path, body)
			require.NoError(t, forwarded.Err, name)
			require.Equal(t, local.Status, forwarded.Status, name)
			require.Equal(t, local.Header.Get("Content-Type"), forwarded.Header.Get("Content-Type"), name)
			require.Equal(t, constant(local.Body), constant(forwarded.Body), name)
			if local.Status == http.StatusOK {
				require.Equal(t, "forwarded", forwarded.Header.Get("X-Evenkeel-Route"), name)
				require.Equal(t, "local", local.Header.Get("X-Evenkeel-Route"), name)
			}
		}
		us.Accounted()
		eu.Accounted()
		require.Equal(t, 4.0, us.Metric(`evenkeel_geo_forwards_total{outcome="ok",peer="eu-1"}`))
		require.Equal(t, 4.0, eu.Metric(`evenkeel_geo_received_total{origin="us-1",outcome="ok"}`))
		for _, c := range []*cluster{us, eu} {
			for _, line := range c.logs.All() {
				require.NotRegexp(t, "one two|four five|six seven|eight nine", fmt.Sprint(line.Message, line.ContextMap()))
			}
		}
		for _, r := range us.receipts() {
			if r.Outcome == geo.OutcomeRelayed {
				continue
			}
			require.Equal(t, "ok", r.Outcome)
			require.Positive(t, r.BytesOut)
			require.Positive(t, r.BytesIn)
			require.InDelta(t, (float64(r.BytesOut)*0.02+float64(r.BytesIn)*0.05)/1e9, r.USD, 1e-15)
			require.GreaterOrEqual(t, r.Actual.CachedTokens, 0)
			require.Positive(t, r.Actual.TTFTMs)
		}
	})
	t.Run("a request for several answers is forwarded whole", func(t *testing.T) {
		for name, body := range map[string]string{
			"several answers":           chat("one two three", `"n":3,`),
			"a list of prompts":         strings.Replace(completion("@", `"max_tokens":8,`), `"@"`, `["four five","six"]`, 1),
			"several answers, streamed": chat("seven eight", `"n":2,"stream":true,"stream_options":{"include_usage":true},`),
		} {
			path := "/v1/chat/completions"
			if strings.Contains(body, `"prompt"`) {
				path = "/v1/completions"
			}
			us.reaches("eu-1")
			local, got := eu.Post(path, body), us.Post(path, body)
			require.NoError(t, got.Err, name)
			require.Equal(t, http.StatusOK, got.Status, "%s: %s", name, got.Body)
			require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"), name)
			require.Equal(t, "local", local.Header.Get("X-Evenkeel-Route"), name)
			if !strings.Contains(body, `"stream"`) { // whose legs take turns as they come
				require.Equal(t, constant(local.Body), constant(got.Body), name)
				here, there := us.receipt(got.Header.Get("X-Request-Id")), eu.receipt(local.Header.Get("X-Request-Id"))
				require.Equal(t, there.OutputTokens, here.OutputTokens, "%s: the tokens of all answers count", name)
			}
			require.Equal(t, len(local.Body), len(got.Body), name)
		}
		eu.Accounted()
		require.Equal(t, 7.0, eu.Metric(`evenkeel_geo_received_total{origin="us-1",outcome="ok"}`))
		us.settled(false)
		eu.settled(false)
	})
	t.Run("a trace goes on there", func(t *testing.T) {
		us.reaches("eu-1")
		r := us.Post(refclient.ChatPath, chat("far away", `"max_tokens":3,`))
		require.Equal(t, "forwarded", r.Header.Get("X-Evenkeel-Route"), r.Body)
		trace := us.receipt(r.Header.Get("X-Request-Id")).TraceID
		require.Equal(t, trace, eu.receipt(r.Header.Get("X-Request-Id")).TraceID)
		var all []tracetest.Span
		us.Eventually("both have exported", func() bool {
			all = us.spans(col, trace)
			return strings.Count(tracetest.Tree(all), "(server)") == 2
		})
		require.Contains(t, tracetest.Tree(all), `    forward (client)
      transfer (internal)
      chat ref (server)
        parse (internal)
        attempt (internal)
`, "the other region's are below the forward, and sampled because we said so")
	})
	t.Run("a receipt names the peer", func(t *testing.T) {
		us.reaches("eu-1")
		r := us.Post(refclient.ChatPath, chat("far away", `"max_tokens":3,`), "X-Request-Id", "far")
		require.Equal(t, "forwarded", r.Header.Get("X-Evenkeel-Route"), r.Body)
		here := us.receipt("far")
		require.Equal(t, "eu-1", here.Peer)
		require.Len(t, here.Attempts, 1)
		require.Equal(t, "eu-1", here.Attempts[0].Peer)
		require.Positive(t, here.Attempts[0].Waits.Transfer)
		there := eu.receipt(here.ID)
		require.Equal(t, "us-1", there.Origin)
		require.NotNil(t, there.Attempts[0].Decode, fmt.Sprintf("%+v", there))
	})
	t.Run("a request that wants to stay does", func(t *testing.T) {
		before := len(us.receipts())
		got := us.Post("/v1/chat/completions", chat("one", ""), "X-Evenkeel-Geo", "local")
		require.Equal(t, http.StatusOK, got.Status)
		require.Equal(t, "local", got.Header.Get("X-Evenkeel-Route"))
		require.Len(t, us.receipts(), before)
	})
	t.Run("a client that leaves frees everything there", func(t *testing.T) {
		before := len(us.receipts())
		us.reaches("eu-1")
		leave := us.Endless()
		require.Equal(t, 1, us.gw.Geo().Status().Peers[0].InFlight)
		leave()
		us.Eventually("the forward has ended", func() bool { return len(us.receipts()) == before+1 })
		require.Equal(t, geo.OutcomeGone, us.receipts()[0].Outcome)
		eu.settled(false)
		eu.Eventually("the other region has counted it", func() bool { return eu.Metric(`evenkeel_requests_total{outcome="client_closed"}`) == 1 })
	})
	t.Run("forged and replayed hops are refused", func(t *testing.T) {
		keys, err := geo.ParseKeys(geoKey)
		require.NoError(t, err)
		stranger, err := geo.ParseKeys("a ffffffffffffffffffffffffffffffff\n")
		require.NoError(t, err)
		body := chat("one two", "")
		send := func(k *geo.Keys, change func(h *geo.Hop), header ...string) reply {
			h := eu.hopFrom("us-1", body)
			if change != nil {
				change(&h)
			}
			return eu.deliver(refclient.ChatPath, body, append(append(papers(k, refclient.ChatPath, &h), geo.TenantHeader, "t"), header...)...)
		}
		got := send(keys, nil)
		require.Equal(t, 200, got.Status, got.Body)
		require.Equal(t, "eu-1", got.Header.Get("X-Evenkeel-Served-By"))
		require.NotEmpty(t, got.Header.Get("X-Evenkeel-Cached-Tokens"))
		for name, row := range map[string]struct {
			keys   *geo.Keys
			change func(h *geo.Hop)
			header []string
			status int
			reject string
		}{
			"signed by a stranger": {keys: stranger, status: 401, reject: "signature"},
			"an old one":           {keys: keys, change: func(h *geo.Hop) { h.Time -= 31_000 }, status: 401, reject: "stale"},
			"another session":      {keys: keys, header: []string{"X-Evenkeel-Session", "another"}, status: 401, reject: "signature"},
			"another class":        {keys: keys, header: []string{"X-Evenkeel-Class", "batch"}, status: 401, reject: "signature"},
			"another tenant":       {keys: keys, header: []string{geo.TenantHeader, "rich"}, status: 401, reject: "signature"},
			"a second hop":         {keys: keys, change: func(h *geo.Hop) { h.N = 2; h.Via = append(h.Via, "us-1") }, status: 508, reject: "hop"},
			"one that was here":    {keys: keys, change: func(h *geo.Hop) { h.Max, h.N, h.Via = 3, 3, []string{"us-1", "eu-1", "us-1"} }, status: 508, reject: "hop"},
			"too many hops":        {keys: keys, change: func(h *geo.Hop) { h.Max = 5 }, status: 508, reject: "hop"},
			"a stranger's name":    {keys: keys, change: func(h *geo.Hop) { h.Origin, h.Via = "mars", []string{"mars"} }, status: 403, reject: "peer_not_allowed"},
			"nobody waits for it":  {keys: keys, change: func(h *geo.Hop) { h.Deadline = h.Time - 1 }, status: 504, reject: "deadline"},
			"for another region":   {keys: keys, change: func(h *geo.Hop) { h.To = "us-1" }, status: 421, reject: "recipient"},
			"for an earlier run":   {keys: keys, change: func(h *geo.Hop) { h.Boot = "b" }, status: 421, reject: "recipient"},
			"another body":         {keys: keys, change: func(h *geo.Hop) { h.Digest = geo.DigestOf() }, status: 401, reject: "signature"},
			"the version before":   {keys: keys, header: []string{geo.HopHeader, "v2;n=1"}, status: 400, reject: "version"},
			"no hop":               {keys: keys, header: []string{geo.HopHeader, ""}, status: 508, reject: "hop"},
		} {
			got := send(row.keys, row.change, row.header...)
			require.Equal(t, row.status, got.Status, name)
			require.Equal(t, row.reject, got.Header.Get("X-Evenkeel-Reject"), name)
		}
		require.Equal(t, 2.0, eu.Metric(`evenkeel_geo_rejects_total{reason="recipient"}`))
		same := func(h *geo.Hop) { h.Nonce = strings.Repeat("ab", 16) }
		require.Equal(t, 200, send(keys, same).Status)
		require.Equal(t, 401, send(keys, same).Status, "a replay")

		// On the listener for clients the headers mean nothing.
		h := geo.Hop{N: 1, Max: 1, Origin: "eu-1", Via: []string{"eu-1"}, RID: "r", Time: 1, Nonce: strings.Repeat("0", 32)}
		got = us.Post("/v1/chat/completions", body, geo.HopHeader, h.String(), geo.TenantHeader, "rich")
		require.Equal(t, 200, got.Status)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"), "n is 0 again")
		require.Equal(t, 404, us.Ask(http.MethodPost, us.URL+geo.ProbePath, "{}").Status)

		eu.gw.Service().Drain(0)
		eu.Eventually("what is new is refused", func() bool {
			got := send(keys, nil)
			return got.Status == 503 && got.Header.Get("X-Evenkeel-Reject") == "draining"
		})
	})
	t.Run("a region that drains is told of", func(t *testing.T) {
		us.Eventually("it is known", func() bool { return us.availability("eu-1") == "draining" })
		got := us.Post("/v1/chat/completions", chat("one", ""))
		require.Equal(t, 200, got.Status)
		require.Equal(t, "local", got.Header.Get("X-Evenkeel-Route"))
	})
	t.Run("a region decides for itself while its centre is gone", func(t *testing.T) {
		require.NoError(t, eu.gw.Shutdown(t.Context()))
		us.Eventually("the centre is down", func() bool { a := us.availability("eu-1"); return a != "available" && a != "draining" })
		got := us.Post(refclient.ChatPath, chat("one two", ""))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "local", got.Header.Get("X-Evenkeel-Route"))
	})
}

// Of a region that follows another one. Legs that it keeps give all their turns back. The other
// region has what is left of a request's deadline, and its class. That a deadline cannot be met is
// no failure of that region.
func TestWhatAFollowerKeepsAndWhatGoesAlong(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, "ops ek-ops , trusted: true")
	us, eu := pair(t, conditional(func(cfg *config.Config) { remote(cfg); cfg.KeysFile = file }),
		options{dirty: true, configure: func(cfg *config.Config) {
			cfg.Geo.Policy, cfg.Pool.Size = "local-only", 1
		}})
	for n := range 8 { // more than the prefiller takes at once
		for _, body := range []string{chat(fmt.Sprint("short ", n), `"n":3,`), strings.Replace(completion("@", ""), `"@"`, `["four five","six"]`, 1)} {
			path := refclient.ChatPath
			if strings.Contains(body, `"prompt"`) {
				path = refclient.CompletionPath
			}
			got := us.Post(path, body, "Authorization", "Bearer ek-ops", "X-Evenkeel-Geo", "local")
			require.Equal(t, http.StatusOK, got.Status, got.Body)
			require.Equal(t, "local", got.Header.Get("X-Evenkeel-Route"))
		}
	}
	us.settled(false)
	require.NoError(t, eu.Prefill[0].SetFaults(refengine.Rule{Fault: refengine.Slow, DelayMS: 60_000}))
	leave, gone := eu.Send(chat("jam", ""))
	eu.Eventually("the only place is taken", func() bool { return eu.gw.Status(t.Context()).PoolUsed == 1 })
	got := us.Post(refclient.ChatPath, chat("one", ""), "Authorization", "Bearer ek-ops", "X-Evenkeel-Deadline-Ms", "2000")
	require.Equal(t, http.StatusServiceUnavailable, got.Status, got.Body)
	require.Equal(t, "deadline_unmet", code(got.Body))
	us.Accounted()
	require.Equal(t, 1.0, us.Metric(`evenkeel_geo_forwards_total{outcome="relayed_error",peer="eu-1"}`))
	eu.Eventually("it is counted there", func() bool { return eu.Metric(`evenkeel_requests_total{outcome="deadline_unmet"}`) == 1 })
	batch := make(chan reply, 1)
	go func() {
		batch <- us.Post(refclient.ChatPath, chat("one", ""), "Authorization", "Bearer ek-ops", "X-Evenkeel-Class", "batch")
	}()
	eu.Eventually("batch waits there", func() bool { return eu.gw.Status(t.Context()).Batch.Waiting == 1 })
	next := eu.queued("", chat("next", ""), "X-Evenkeel-Geo", "local")
	knocks := func() reply { return eu.knock("us-1", refclient.ChatPath, chat("two", `"max_tokens":2,`)) }
	require.Equal(t, http.StatusOK, eu.Ask(http.MethodPut, eu.admin+"/geo", `{"policy":"skylb:tau=0"}`).Status)
	busy := knocks()
	require.Equal(t, http.StatusServiceUnavailable, busy.Status, busy.Body)
	require.Equal(t, "peer_busy", busy.Header.Get("X-Evenkeel-Reject"))
	require.Equal(t, "peer_busy", code(busy.Body))
	require.Equal(t, 1.0, eu.Metric(`evenkeel_geo_rejects_total{reason="peer_busy"}`))
	require.NoError(t, eu.Prefill[0].SetFaults())
	leave()
	gone()
	<-batch
	<-next
	eu.Eventually("nothing waits", func() bool { return knocks().Status == http.StatusOK })
}

func TestWhatTheLocalRegionCannotServeGoesElsewhere(t *testing.T) {
	t.Parallel()
	us, _ := pair(t, options{}, options{})
	t.Run("the policy can be changed while it runs", func(t *testing.T) {
		put := func(body string) reply { return us.Ask(http.MethodPut, us.admin+"/geo", body) }
		got := put(`{"policy":"skylb:tau=2","qs":2}`)
		require.Equal(t, 200, got.Status, got.Body)
		var s geo.Status
		require.NoError(t, json.Unmarshal([]byte(us.get("/geo").Body), &s))
		require.Equal(t, "skylb:tau=2", s.Policy)
		require.Equal(t, 2.0, s.QS)
		require.Equal(t, 400, put(`{"policy":"nonsense"}`).Status)
		require.Equal(t, 400, put(`{"qs":-1}`).Status)
		us.Eventually("it decides", func() bool {
			return us.Post("/v1/chat/completions", chat("one", "")).Status == 200 && us.Metric(`evenkeel_geo_decisions_total{policy="skylb",route="local"}`) > 0
		})
		require.Equal(t, 200, us.get("/geo/receipts?n=5").Status)
		require.Equal(t, 200, put(`{"policy":"finish","qs":1}`).Status)
	})
	t.Run("a request whose last engine fails", func(t *testing.T) {
		us.Prefill[0].Close() // and nobody has noticed yet
		got := us.Post("/v1/chat/completions", chat("one two", `"stream":true,`))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"))
		got = us.Post("/v1/chat/completions", chat("one two", ""), "X-Evenkeel-Geo", "local")
		require.GreaterOrEqual(t, got.Status, 500, "one that wants to stay does")
		us.settled(false)
	})
	t.Run("one that no engine could serve", func(t *testing.T) {
		us.Eventually("its engine is down", func() bool { return us.Metric(`evenkeel_prefill_candidates{state="open"}`) == 0 })
		got := us.Post("/v1/chat/completions", chat("one two", `"stream":true,`))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"))
		require.Equal(t, http.StatusOK, us.get("/readyz").Status)
	})
	t.Run("one for several answers", func(t *testing.T) {
		us.Eventually("its engine is down", func() bool { return us.Metric(`evenkeel_prefill_candidates{state="open"}`) == 0 })
		got := us.Post("/v1/chat/completions", chat("one two", `"n":2,`))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"))
	})
}

// A request whose decode rank fails at its prompt, and that no prefill engine here can
// serve, is answered in another region. Nothing of its way there is left behind.
func TestAPromptThatADecodeRankFailsAtGoesToAnotherRegion(t *testing.T) {
	t.Parallel()
	us, _ := pair(t, conditional(nil), options{})
	us.Prefill[0].Close()
	us.Eventually("its engine is down", func() bool { return us.Metric(`evenkeel_prefill_candidates{state="open"}`) == 0 })
	require.NoError(t, us.Decode[0].SetFaults(refengine.Rule{Fault: refengine.Busy, Leg: refengine.LegPlain, Count: 1}))
	got := us.Post(refclient.ChatPath, chat("one two", `"stream":true,`))
	require.Equal(t, http.StatusOK, got.Status, got.Body)
	require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"))
	require.EqualValues(t, 1, us.Metric("evenkeel_local_prefill_failures_total"))
	us.Eventually("nothing is under way to the peer", func() bool { return us.gw.Geo().Status().Peers[0].InFlight == 0 })
	us.settled(false)
}
