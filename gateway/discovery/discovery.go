// Package discovery adds the engines that files, DNS and Kubernetes list to the fleet, after each
// engine has passed a trial.
package discovery

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"evenkeel/dispatcher/board"
	"evenkeel/engine/discover"
	"evenkeel/engine/discover/dns"
	"evenkeel/engine/discover/kube"
	"evenkeel/gateway/cluster"
	"evenkeel/gateway/config"
	"evenkeel/gateway/detect"
	"evenkeel/gateway/fleet"
	"evenkeel/gateway/metaserver"
	"evenkeel/gateway/selftest"
	"evenkeel/internal/smallfile"
)

// Deps is what discovery needs of the proxy.
type Deps struct {
	Fleet      *fleet.Fleet
	Settings   func() *fleet.Settings // the current settings
	Dispatch   func(context.Context) board.Status
	Callbacks  *metaserver.Server // receives the callbacks of decode engines; nil: there is none
	Registerer prometheus.Registerer
	Log        *zap.Logger
}

// Discovery finds engines for the fleet. It reports an engine only when its source says something
// new, so that an operator's later change of the engine stays in force. It leaves the engines that
// the config lists alone.
type Discovery struct {
	*discover.Discoverer
	sources []discover.Source
}

// New returns a discovery that reports the engines of the sources to the fleet. The result is nil
// if there are no sources.
func New(d *Deps, sources ...discover.Source) *Discovery {
	if len(sources) == 0 {
		return nil
	}
	cfg := discover.Config{Fleet: discovered{d}, Sources: sources, Registerer: d.Registerer, Log: d.Log}
	if d.Settings().Discovery.Probe {
		cfg.Probe = d.tryEngine
	}
	return &Discovery{discover.New(cfg), sources}
}

// Sources returns the sources (files, DNS, Kubernetes) that the config names.
func (d *Deps) Sources() (sources []discover.Source, err error) {
	conf := &d.Settings().Discovery
	for _, path := range conf.Files {
		sources = append(sources, &fileSource{settings: d.Settings, path: path, changed: make(chan struct{}, 1)})
	}
	for _, c := range conf.DNS {
		sources = append(sources, dns.New(dns.Config{
			Host: c.Name, Type: c.Type, Role: c.Role, Scheme: c.Scheme, Port: c.Port, Interval: c.Interval, Misses: c.Misses,
			Attributes: discover.Attributes{Profile: c.Profile, Region: c.Region, Ranks: c.Ranks, Group: c.Group, Barrier: c.Barrier,
				Slots: c.Slots},
		}))
	}
	for i, c := range conf.Kubernetes {
		server, namespace, err := cluster.Find(c.Kubeconfig, c.Namespace)
		if err != nil {
			return nil, fmt.Errorf("discovery.kubernetes[%d]: %w", i, err)
		}
		client, err := kube.NewClient(server)
		if err != nil {
			return nil, fmt.Errorf("discovery.kubernetes[%d]: %w", i, err)
		}
		sources = append(sources, kube.New(kube.Config{
			Client: client, Namespace: namespace, Selector: c.Selector, Role: c.Role, RoleLabel: c.RoleLabel, Port: c.Port, Scheme: c.Scheme,
			Slices: *c.Slices, Log: d.Log,
			Attributes: discover.Attributes{Profile: c.Profile, Region: c.Region, Ranks: c.Ranks, Group: c.Group, Barrier: c.Barrier,
				Slots: c.Slots},
		}))
	}
	return sources, nil
}

// Refresh makes discovery read the files that list engines again if they have changed. It must also
// be called after a reload, because the config may list other engines and other profiles now.
func (d *Discovery) Refresh() {
	d.Recheck()
	for _, s := range d.sources {
		if file, ok := s.(*fileSource); ok {
			file.requestRead()
		}
	}
}

// State returns what discovery has found; nil: there is no discovery.
func (d *Discovery) State() *discover.Status {
	if d == nil {
		return nil
	}
	return new(d.Status())
}

// Failure says which sources of discovery fail and the first line of why, as an addition to a
// message about missing engines; empty: every source works, or nothing is discovered (d is nil).
func (d *Discovery) Failure() (text string) {
	if d == nil {
		return ""
	}
	var now detect.Facts
	d.Facts(&now)
	for _, s := range now.Sources {
		if s.Error != "" {
			why, _, _ := strings.Cut(s.Error, "\n")
			text += "; discovery by " + s.Name + " fails: " + why
		}
	}
	return text
}

// Facts fills in the state of each source, with those of its engines that failed the trial or were
// refused, and why.
func (d *Discovery) Facts(f *detect.Facts) {
	status := d.Status()
	for _, source := range status.Sources {
		fact := detect.Source{Name: source.Name, Engines: source.Engines, Error: source.Error}
		for _, e := range status.Engines {
			if e.Source == source.Name && e.State == discover.Unfit {
				fact.Unfit = append(fact.Unfit, detect.Unfit{ID: e.ID, Role: e.Role, Why: e.Why})
			}
		}
		f.Sources = append(f.Sources, fact)
	}
}

// tryEngine is the trial before an engine's first request; nil: the engine may serve. An engine
// that only prefills or only decodes is tried together with partners, which are engines of the
// other role that already serve. The trial needs a free slot on the decode rank that is tried. If
// the engine was here before, its old requests may still have all slots: then tryEngine waits. It
// uses no decode partner whose rank is full. Warnings of the trial are only logged.
func (deps *Deps) tryEngine(ctx context.Context, e discover.Engine) error {
	set := deps.Settings()
	conf, err := set.CompleteFound(e.Role, engineOf(e))
	if err != nil {
		return err
	}
	var partners []config.Engine // engines of the other role; an engine that prefills and decodes has none
	for _, other := range deps.Fleet.Now().Engines() {
		arePair := e.Role != discover.Aggregated && other.Role != discover.Aggregated && other.Role != e.Role
		if arePair && other.Serves() {
			partners = append(partners, other.Conf)
		}
	}
	if e.Role != discover.Prefill { // the engine itself decodes
		if err := deps.awaitSlot(ctx, conf); err != nil {
			return err
		}
	} else { // the partners decode
		full := deps.fullRanks(ctx)
		partners = slices.DeleteFunc(partners, func(partner config.Engine) bool { return full[triedRank(partner)] })
	}
	findings, err := selftest.TryEngine(ctx, set.Config, e.Role, conf, partners, deps.Callbacks)
	for _, found := range findings {
		if found.Level == selftest.Warn {
			deps.Log.Warn("the trial of a discovered engine found something unexpected", zap.String("engine", found.Engine),
				zap.String("finding", found.Msg))
		}
	}
	return err
}

// slotTimeout is how long a trial waits for a slot. After that the trial fails, and is repeated
// later.
const slotTimeout = 10 * time.Second

// awaitSlot waits until the tried rank of an engine has a free slot, and fails after slotTimeout.
// The dispatcher still counts the slots of requests from before the engine left.
func (d *Deps) awaitSlot(ctx context.Context, e config.Engine) error {
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for end := time.Now().Add(slotTimeout); d.fullRanks(ctx)[triedRank(e)]; {
		if time.Now().After(end) {
			return fmt.Errorf("rank %s has no free slot to try it with: requests from before it left still run there", triedRank(e))
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// fullRanks returns the names of the ranks without a free slot.
func (d *Deps) fullRanks(ctx context.Context) map[string]bool {
	full := map[string]bool{}
	for _, m := range d.Dispatch(ctx).Models {
		for _, w := range m.Workers {
			if w.Used >= w.Slots {
				full[w.Name] = true
			}
		}
	}
	return full
}

// triedRank returns the name of the rank on which a decode engine is tried.
func triedRank(e config.Engine) string {
	id, _ := config.InstanceID(e.URL) // the URL was checked before
	if e.Ranks > 0 {                  // an engine with several ranks is tried on its first one
		id += "/0"
	}
	return id
}

// fileSource is a file that lists engines. Refresh calls requestRead when the file may have
// changed.
type fileSource struct {
	settings func() *fleet.Settings
	path     string
	changed  chan struct{}
	lastRead [sha256.Size]byte
}

// Name is "file:" and the path.
func (s *fileSource) Name() string { return "file:" + s.path }

// requestRead makes Run read the file again. It does not block, because one pending read is enough.
func (s *fileSource) requestRead() {
	select {
	case s.changed <- struct{}{}:
	default: // a read is pending already
	}
}

// Run reads the file whenever it may have changed, until ctx ends, and reports its engines, or why
// it cannot be read.
func (s *fileSource) Run(ctx context.Context, report func([]discover.Engine, error)) {
	for {
		if list, changed, err := s.readIfChanged(); changed {
			report(list, err)
		}
		select {
		case <-s.changed:
		case <-ctx.Done():
			return
		}
	}
}

// readIfChanged reads the file. changed is false if the last reading had no error and found the
// same text. With an error, changed is true, and the next reading parses the text again even if it
// is the same, because an error may be due to the profiles of the config.
func (s *fileSource) readIfChanged() (list []discover.Engine, changed bool, err error) {
	text, err := smallfile.Read(s.path, config.MaxFile)
	sum := sha256.Sum256(text)
	if err == nil && sum == s.lastRead {
		return nil, false, nil
	}
	s.lastRead = [sha256.Size]byte{} // no text counts as read until this one has turned out to be valid
	var engines config.Engines
	if err == nil {
		engines, err = s.settings().ParseEngines(s.path, text)
	}
	if err != nil {
		return nil, true, err
	}
	for role, e := range engines.All() {
		id, err := config.InstanceID(e.URL)
		if err != nil {
			return nil, true, err
		}
		list = append(list, discover.Engine{Role: role, Address: id, URL: e.URL, Attributes: attributesOf(e)})
	}
	s.lastRead = sum
	return list, true, nil
}
