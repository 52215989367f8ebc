package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
)

// leased are the scenes of regions that are owned by lease.
var leased = []scene{{"a leased region dies", playLeasedDeath}, {"afterwards", playAfter}}

// playLeased plays them, on loopback: all proxies reach the store that this
// process runs.
func playLeased(ctx context.Context, o options) (*report, error) {
	folder, err := os.MkdirTemp("", "evenkeel-regions-etcd-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(folder) }()
	store, err := startStore(folder)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	defer store.Close()
	o.on, o.lease = "loopback", "http://"+store.Clients[0].Addr().String()
	r, err := play(ctx, o, leased)
	if err != nil {
		return nil, err
	}
	for i := range r.rows { // beside the same scenes by order
		r.rows[i].scene = "by lease: " + r.rows[i].scene
	}
	return r, nil
}

// startStore runs an etcd of one member in this process.
func startStore(folder string) (*embed.Etcd, error) {
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.LogOutputs = folder, "error", []string{"/dev/null"}
	local := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenClientUrls, cfg.ListenPeerUrls = []url.URL{local}, []url.URL{local}
	cfg.UnsafeNoFsync = true
	e, err := embed.StartEtcd(cfg)
	if err == nil {
		<-e.Server.ReadyNotify()
	}
	return e, err
}

// playLeasedDeath is playDeath with a lease: the engines of the dead region,
// which know their callers by what they sign with, say whether ever two
// dispatchers admitted to them at once.
func playLeasedDeath(ctx context.Context, w *world, r *report) error {
	const scene = "never two admit to a rank"
	if err := playDeath(ctx, w, r); err != nil {
		return err
	}
	turns, over, err := w.callers(w.regions[eu].place.decode)
	if err != nil {
		return err
	}
	r.add(scene, "eu's decode engine: %d changes of who admits, eu to us and back; %d requests beyond its slots", turns, over)
	r.hold(turns == 2 && over == 0, scene, "who admits changed %d times, %d requests were beyond the slots", turns, over)
	return nil
}

// callers is what an engine counted of those who call it.
func (w *world) callers(at string) (turns, overAdmitted int64, err error) {
	req, err := http.NewRequest(http.MethodGet, "http://"+at+"/stats", nil)
	if err != nil {
		return 0, 0, err
	}
	resp, err := w.http.Do(req)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, 0, err
	}
	var stats struct {
		Turns int64 `json:"caller_turns"`
		Over  int64 `json:"over_admitted"`
	}
	return stats.Turns, stats.Over, json.Unmarshal(text, &stats)
}
