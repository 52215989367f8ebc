package gateway_test

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refclient"
	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/certs/certtest"
	"evenkeel/gateway/config"
	"evenkeel/geo"
)

// slowRegion and fastRegion are regions by what they think a prefill takes them.
func slowRegion(cfg *config.Config) {
	cfg.Prefill.Calibration.TPMs, cfg.Prefill.Calibration.T0Ms = 1, 5000
}

func fastRegion(cfg *config.Config) {
	cfg.Prefill.Calibration.TPMs, cfg.Prefill.Calibration.T0Ms = 0.01, 0.1
}

func TestFinishGoesWhereTheAnswerBeginsSooner(t *testing.T) {
	t.Parallel()
	const stays = "stays" // a model that may not leave
	two := []refengine.Config{{KV: refengine.KV{PrefixCache: 4096}, Answers: refengine.Answers{PromptTokensDetails: true}},
		{Model: refengine.Model{Name: stays}}}
	us, eu := pair(t, options{prefill: two, decode: two, configure: func(cfg *config.Config) {
		slowRegion(cfg)
		cfg.Geo.Residency = map[string][]string{stays: {"us"}}
	}}, options{prefill: two, decode: two, configure: fastRegion})
	us.Eventually("it goes to the faster region", func() bool {
		return us.Post("/v1/chat/completions", chat("one two", `"stream":true,`)).Header.Get("X-Evenkeel-Route") == "forwarded"
	})
	us.Accounted()
	r := us.receipts()[0]
	require.Equal(t, "eu-1", r.Peer)
	require.Positive(t, us.Metric(`evenkeel_geo_cost_error_seconds_count{peer="eu-1"}`), "what a forward cost beyond its prediction is counted")
	require.Greater(t, r.Predicted.LocalCost, 4000.0)
	require.Less(t, r.Predicted.RTT+r.Predicted.T0+r.Predicted.Prefill, 1000.0)
	eu.Eventually("nobody is better", func() bool {
		return eu.Post("/v1/chat/completions", chat("one two", "")).Header.Get("X-Evenkeel-Route") == "local"
	})
	us.Eventually("eu-1 has the other model, too", func() bool { return us.gw.Geo().Status().Peers[0].Available[stays] == "available" })
	for range 3 {
		r := us.Post(refclient.ChatPath, strings.Replace(chat("one", ""), model, stays, 1))
		require.Equal(t, http.StatusOK, r.Status, r.Body)
		require.Equal(t, "local", r.Header.Get("X-Evenkeel-Route"))
	}
}

// Only a region to which a tenant's requests may not go serves the model. Such a request is refused
// at once, and waits for no engine.
func TestAModelThatResidencyForbidsIsRefusedAtOnce(t *testing.T) {
	t.Parallel()
	const there = "there" // a model of the other region
	theirs := []refengine.Config{{}, {Model: refengine.Model{Name: there}}}
	file := filepath.Join(t.TempDir(), "keys.yaml")
	refclient.KeyFile(t, file, "acme ek-acme", "globex ek-globex")
	us, _ := pair(t, options{configure: func(cfg *config.Config) {
		cfg.KeysFile, cfg.Geo.Residency = file, map[string][]string{"acme": {"us"}}
	}}, options{prefill: theirs, decode: theirs})
	ask := func(key string) reply {
		return us.Post(refclient.ChatPath, strings.Replace(chat("one", ""), model, there, 1), "Authorization", "Bearer ek-"+key)
	}
	us.Eventually("the other region's model is served", func() bool { return ask("globex").Status == http.StatusOK })
	r := ask("acme")
	require.Equal(t, http.StatusForbidden, r.Status, r.Body)
	require.Contains(t, r.Body, "residency_forbids")
}

func TestThreeRegions(t *testing.T) {
	t.Parallel()
	at := freePorts(t, 3)
	ids := []string{"us-1", "eu-1", "as-1"}
	var all []*cluster
	for i, id := range ids {
		var peers []string
		for k := range ids {
			if k != i {
				peers = append(peers, ids[k], at[k])
			}
		}
		all = append(all, start(t, options{configure: func(cfg *config.Config) {
			region(t, cfg, id, at[i], peers...)
			cfg.Geo.Policy = "skylb"
		}}))
	}
	us := all[0]
	for _, c := range all {
		c.hasEngines()
	}
	us.Prefill[0].Close()
	us.Eventually("both peers are available and the own engine is not", func() bool {
		return us.availability("eu-1") == "available" && us.availability("as-1") == "available" && us.Metric(`evenkeel_prefill_candidates{state="open"}`) == 0
	})
	long := strings.Repeat("the same long beginning of a conversation ", 60)
	for n := range 4 {
		got := us.Post("/v1/chat/completions", chat(long+fmt.Sprint(n), `"stream":true,`))
		require.Equal(t, http.StatusOK, got.Status, got.Body)
		require.Equal(t, "forwarded", got.Header.Get("X-Evenkeel-Route"))
	}
	us.Accounted()
	receipts := us.receipts()
	require.Len(t, receipts, 4)
	for _, r := range receipts {
		require.Equal(t, receipts[3].Peer, r.Peer, "where the prefix is")
	}
}

func TestRegionsThatShowCertificates(t *testing.T) {
	t.Parallel()
	ca := certtest.New(t)
	until := time.Now().Add(time.Hour)
	at := freePorts(t, 2)
	mutual := func(id, peer, listen, peerAt string) func(*config.Config) {
		return func(cfg *config.Config) {
			region(t, cfg, id, listen, peer, peerAt)
			g := &cfg.Geo
			g.HMAC.KeysFile = ""
			g.TLS.Cert, g.TLS.Key = ca.Issue(t, id+".mesh", until)
			g.TLS.CA = ca.File
			g.Peers[0].URL, g.Peers[0].SAN = "https://"+peerAt, peer+".mesh"
			g.Mode, g.Central = geo.Central, "eu-1"
		}
	}
	eu := start(t, options{configure: mutual("eu-1", "us-1", at[1], at[0])})
	us := start(t, options{configure: mutual("us-1", "eu-1", at[0], at[1])})
	us.hasEngines()
	us.reaches("eu-1")
	us.Eventually("a request went there", func() bool {
		require.Equal(t, "right", us.Judge("one two three", `"stream":true,`))
		return len(us.receipts()) > 0
	})
	require.Equal(t, geo.OutcomeOK, us.receipts()[0].Outcome)

	now := time.Now()
	h := geo.Hop{N: 1, Max: 1, Origin: "us-1", Via: []string{"us-1"}, RID: "r", Time: now.UnixMilli(), Nonce: strings.Repeat("0", 32), Deadline: now.Add(time.Minute).UnixMilli(), To: "eu-1", Digest: geo.DigestOf([]byte(`{"v":"1.0","id":"us-1"}`))}
	call := func(c *tls.Config) (int, error) {
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: c, DisableKeepAlives: true}}
		req, err := http.NewRequest(http.MethodPost, "https://"+eu.gw.GeoAddr()+geo.ProbePath, strings.NewReader(`{"v":"1.0","id":"us-1"}`))
		require.NoError(t, err)
		req.Header.Set(geo.HopHeader, h.String())
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		_ = resp.Body.Close()
		return resp.StatusCode, nil
	}
	with := func(name string, authority *certtest.Authority) *tls.Config {
		pair, err := tls.LoadX509KeyPair(authority.Issue(t, name, until))
		require.NoError(t, err)
		return &tls.Config{RootCAs: ca.Pool(), Certificates: []tls.Certificate{pair}}
	}
	status, err := call(with("us-1.mesh", ca))
	require.NoError(t, err)
	require.Equal(t, 200, status)
	status, err = call(with("mars.mesh", ca))
	require.NoError(t, err)
	require.Equal(t, 403, status, "a certificate of the group, but not that peer's")
	_, err = call(with("us-1.mesh", certtest.New(t)))
	require.Error(t, err, "somebody else signed it")
	_, err = call(&tls.Config{RootCAs: ca.Pool()})
	require.Error(t, err, "no certificate")
	old := with("us-1.mesh", ca)
	old.MaxVersion = tls.VersionTLS12
	_, err = call(old)
	require.Error(t, err, "TLS 1.2")
}
