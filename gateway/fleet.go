package gateway

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/dispatcher"
	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
	"evenkeel/prefill"
	"evenkeel/prefill/kvevents"
	"evenkeel/prefill/local"
)

// A fleet knows the engines: who they are, which models and ranks they have,
// whether they are up. It tells prefill tier and dispatcher whenever that
// changes. Identities outlive health: a rank that comes back finds its load.
type fleet struct {
	gw *Gateway

	publishing sync.Mutex // what is published last is what is true last

	mu        sync.RWMutex
	instances map[string]*instance // by role and host:port
	order     []string             // as configured, then as added
	ranks     map[int32]*rank      // those of engines that are gone for a while, too: assignments may be on their way
	ids       map[string]int32     // rank name → worker id, never reused
	routes    map[string]route     // model or LoRA name → board
	hosts     map[string]bool      // where a prefiller's KV may be pulled from
	stops     map[string]*stopped  // engines and ranks that drain, by role and id
	added     int                  // engines that ever were
	asked     int                  // times a prefill engine was asked for token ids
	again     *time.Timer          // publishes while an engine gets its load step by step
}

// Roles of an engine.
const (
	rolePrefill = "prefill"
	roleDecode  = "decode"
)

// instance is one engine's API server.
type instance struct {
	id      string // host:port
	role    string
	engine  *engine.Target // without a rank
	conf    config.Engine
	profile *mooncake.Profile
	status  engine.Status
	number  int // in the order of arrival
	standing
}

func (i *instance) key() string { return i.role + " " + i.id }

// rank is one place a decode leg can be sent to.
type rank struct {
	Worker   int32
	Instance string // the monitor's id
	Target   *engine.Target
	Profile  *mooncake.Profile
	Traffic  *engine.Traffic
	Region   string // empty: ours

	gone time.Time // its engine is, since then; under the fleet's mu
}

// route is where a model's requests go.
type route struct {
	name    string // as the client wrote it: a base model or a LoRA
	board   string // the base model, whose ranks they share
	maxLen  int    // context length, 0 = unknown
	prefill bool   // some prefill engine that is up has it
	decode  bool   // some decode rank that is up has it
}

// defaultSlots is what a rank is given when nobody says its max_num_seqs, which
// cannot be discovered (contract 3).
const defaultSlots = 32

func newFleet(gw *Gateway) *fleet {
	f := &fleet{
		gw: gw, instances: map[string]*instance{}, ranks: map[int32]*rank{}, ids: map[string]int32{},
		routes: map[string]route{}, hosts: map[string]bool{}, stops: map[string]*stopped{},
	}
	f.again = time.AfterFunc(time.Hour, f.publish)
	f.again.Stop()
	return f
}

// add registers an engine. An engine that is known already keeps its state.
func (f *fleet) add(role string, e config.Engine) error {
	in, err := f.build(role, e, f.gw.conf())
	if err != nil {
		return err
	}
	f.mu.Lock()
	if f.instances[in.key()] == nil {
		f.order = append(f.order, in.key())
	}
	f.put(in)
	f.mu.Unlock()
	if role == rolePrefill {
		f.learnHosts(in)
	}
	f.watch()
	f.publish()
	return nil
}

// build makes an engine of its description.
func (f *fleet) build(role string, e config.Engine, set *settings) (*instance, error) {
	id, err := config.InstanceID(e.URL)
	if err != nil {
		return nil, err
	}
	profile, ok := set.profiles[e.Profile]
	if !ok {
		return nil, fmt.Errorf("%s engine %s: no profile is named %q", role, id, e.Profile)
	}
	target, err := config.Target(e, profile)
	if err != nil {
		return nil, fmt.Errorf("%s %w", role, err)
	}
	in := &instance{id: id, role: role, engine: target, conf: e, profile: profile}
	if role == roleDecode && e.Slots == 0 {
		in.conf.Slots = defaultSlots
		f.gw.log.Warn("slots of a decode engine are not set and cannot be discovered; set engines.decode[].slots to its --max-num-seqs",
			zap.String("engine", id), zap.Int("assumed", defaultSlots))
	}
	if role == roleDecode && profile.AllowLocalPrefill && profile.MaxBatchedTokens == 0 && profile.Connector == mooncake.AscendMooncakeV1 {
		f.gw.log.Warn("decode engines on Ascend are usually started with few tokens a step and without a prefix cache, so that a prompt computed there makes its whole group wait; set max_num_batched_tokens of the profile to theirs, or allow_local_prefill to false",
			zap.String("engine", id), zap.String("profile", e.Profile))
	}
	return in, nil
}

// put takes an engine in, in the place of the one it was before. It is called
// with f.mu held.
func (f *fleet) put(in *instance) {
	if old, ok := f.instances[in.key()]; ok {
		in.status, in.standing, in.number = old.status, old.standing, old.number
	} else {
		f.added++
		in.number = f.added
	}
	f.instances[in.key()] = in
	if in.role == roleDecode {
		for _, r := range ranksOf(in) { // numbered as configured, whoever comes up first
			f.number(in.target(r).ID)
		}
	}
}

// remove takes an engine out: its requests finish, it gets no new ones.
func (f *fleet) remove(role, id string) error {
	f.mu.Lock()
	in, ok := f.instances[role+" "+id]
	if ok {
		delete(f.instances, in.key())
		f.abandon(in.key())
		f.order = slices.DeleteFunc(f.order, func(k string) bool { return k == in.key() })
	}
	f.mu.Unlock()
	if !ok {
		return fmt.Errorf("%w: %s %s", ErrNoSuchEngine, role, id)
	}
	f.gw.metrics.slowStart.DeleteLabelValues(in.key(), role)
	f.watch()
	f.publish()
	return nil
}

// learnHosts adds the names and addresses a prefiller's hand-offs may point
// decode engines at. Any other host in a hand-off is refused (contract 10).
func (f *fleet) learnHosts(in *instance) {
	hosts := append([]string{in.engine.URL.Hostname()}, in.profile.KVHosts...)
	ctx, cancel := context.WithTimeout(f.gw.ctx, 2*time.Second)
	defer cancel()
	for _, h := range slices.Clone(hosts) {
		addrs, err := net.DefaultResolver.LookupHost(ctx, h)
		if err != nil {
			f.gw.log.Warn("name of a prefill engine does not resolve; its hand-offs are accepted by name only", zap.String("host", h), zap.Error(err))
		}
		hosts = append(hosts, addrs...)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range hosts {
		f.hosts[h] = true
	}
}

func (f *fleet) knownHost(host string) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.hosts[host]
}

// watch gives the monitor the present list.
func (f *fleet) watch() {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var list []engine.Instance
	for _, k := range f.order {
		in := f.instances[k]
		watched := engine.Instance{ID: k, Role: in.role, Target: in.target(-1)}
		if in.role == roleDecode { // the prefill tier tries its own with requests
			watched.Slots = in.conf.Slots
			for _, r := range ranksOf(in) {
				watched.Canaries = append(watched.Canaries, in.target(r))
			}
		}
		list = append(list, watched)
	}
	f.gw.monitor.Set(list)
}

// target addresses one rank of the engine, -1 the engine itself.
func (i *instance) target(rank int) *engine.Target {
	t := *i.engine
	if rank >= 0 {
		t.ID, t.Rank = i.id+"/"+strconv.Itoa(rank), rank
	}
	return &t
}

// onStatus is the monitor's callback.
func (f *fleet) onStatus(key string, s engine.Status) {
	f.mu.Lock()
	in, ok := f.instances[key]
	if ok {
		in.status = s
	}
	f.mu.Unlock()
	if ok {
		f.publish()
	}
}

// publish derives what prefill tier, dispatcher and API need from the engines'
// present state.
func (f *fleet) publish() {
	f.publishing.Lock()
	defer f.publishing.Unlock()
	f.mu.Lock()
	routes := map[string]route{}
	var candidates []prefill.Candidate
	var workers []dispatcher.Worker
	var locals []local.Rank
	f.appraise(time.Now())
	for _, k := range f.order {
		in := f.instances[k]
		f.route(routes, in, in.serving && f.takes(in, -1))
		for _, r := range ranksOf(in) {
			up := in.serving && f.takes(in, r)
			if in.role == rolePrefill {
				candidates = append(candidates, f.candidate(in, r, up))
			} else if len(in.status.Models) > 0 { // before that its board is unknown
				w := f.worker(in, r, up)
				workers = append(workers, w)
				if in.profile.AllowLocalPrefill {
					locals = append(locals, local.Rank{ID: w.ID, Name: w.Name, Model: w.Model, Engine: w.Engine, Capacity: w.Capacity, Up: up})
				}
			}
		}
	}
	onlyWhereDecoded(candidates, workers)
	f.routes = routes
	f.forgetRanks(time.Now())
	f.mu.Unlock()
	f.gw.tier.SetCandidates(candidates)
	f.gw.locals.Set(locals)
	f.gw.dispatcher.SetWorkers(workers)
}

// onlyWhereDecoded takes out of service the prefillers of other regions in
// whose region nothing decodes: their KV could go nowhere.
func onlyWhereDecoded(candidates []prefill.Candidate, workers []dispatcher.Worker) {
	for i := range candidates {
		c := &candidates[i]
		if c.Live && c.Region != "" {
			c.Live = slices.ContainsFunc(workers, func(w dispatcher.Worker) bool {
				base, there := strings.CutSuffix(w.Model, boardIn("", c.Region))
				return w.Up && there && slices.Contains(c.Models, base)
			})
		}
	}
}

func ranksOf(in *instance) []int {
	if in.conf.Ranks == 0 {
		if in.role == rolePrefill && in.profile.Connector == mooncake.VLLMMooncake {
			return []int{0} // it wants the header even for its only rank (contract 1.2)
		}
		return []int{-1}
	}
	ranks := make([]int, in.conf.Ranks)
	for i := range ranks {
		ranks[i] = i
	}
	return ranks
}

func (f *fleet) candidate(in *instance, r int, up bool) prefill.Candidate {
	c := prefill.Candidate{
		ID: in.id + "/" + strconv.Itoa(max(0, r)), Instance: in.key(), Target: in.target(r), Profile: in.profile,
		Hardware: in.conf.Profile, CapacityTokens: capacityOf(in, r), Region: f.abroad(in), Live: up, Limit: in.limit(slowProbes),
	}
	if in.profile.KVTokensPerRank > 0 {
		c.CapacityTokens = in.profile.KVTokensPerRank
	}
	for _, m := range in.status.Models {
		c.Models = append(c.Models, m.ID)
	}
	if len(c.Models) > 0 {
		c.Events = eventsOf(in, r, f.gw.conf().Prefill.KVEvents)
	}
	return c
}

// eventsOf is where a rank says what its prefix cache holds. Without an entry of
// its own an engine has the ports that all have.
func eventsOf(in *instance, r int, all config.KVEvents) prefill.EventSource {
	if !all.Enabled {
		return prefill.EventSource{}
	}
	host, rank := in.engine.URL.Hostname(), max(0, r)
	s := prefill.EventSource{
		Events: kvevents.Endpoint(host, cmp.Or(in.conf.KVEventsPort, all.Port), rank),
		Model:  boardOf(in.status.Models), ReplayTimeout: all.ReplayTimeout,
	}
	if port := cmp.Or(in.conf.KVReplayPort, all.ReplayPort); port != 0 {
		s.Replay = kvevents.Endpoint(host, port, rank)
	}
	return s
}

// capacityOf is what the engine reports for the rank; the only series of a
// single-rank server counts whatever its label.
func capacityOf(in *instance, r int) int64 {
	if n, ok := in.status.CapacityTokens[strconv.Itoa(max(0, r))]; ok {
		return n
	}
	if r < 0 && len(in.status.CapacityTokens) == 1 {
		for _, n := range in.status.CapacityTokens {
			return n
		}
	}
	return 0
}

// worker is called with f.mu held.
func (f *fleet) worker(in *instance, r int, up bool) dispatcher.Worker {
	t := in.target(r)
	id := f.number(t.ID)
	f.ranks[id] = &rank{Worker: id, Instance: in.key(), Target: t, Profile: in.profile, Traffic: f.gw.monitor.Traffic(in.key()), Region: f.abroad(in)}
	w := dispatcher.Worker{
		ID: id, Name: t.ID, Model: boardIn(boardOf(in.status.Models), f.abroad(in)), Group: in.conf.Group, Barrier: in.conf.Barrier == "dp",
		Engine: in.id, Slots: in.conf.Slots, Limit: in.limit(in.conf.Slots), Capacity: in.conf.KV, Cost: in.conf.Cost, Up: up,
	}
	if w.Capacity == 0 {
		w.Capacity = capacityOf(in, r)
	}
	limit, capacity := f.gw.owners.room(in.conf.Region, t.ID, w.Slots, w.Capacity)
	if w.Capacity = capacity; limit > 0 && (w.Limit == 0 || limit < w.Limit) {
		w.Limit = limit
	}
	return w
}

// number is a rank's identity on the board. It is called with f.mu held.
func (f *fleet) number(rank string) int32 {
	id, ok := f.ids[rank]
	if !ok {
		id = int32(len(f.ids))
		f.ids[rank] = id
	}
	return id
}

// boardOf is the base model an engine serves; its LoRAs share the ranks.
func boardOf(models []engine.Model) string {
	for _, m := range models {
		if m.Parent == "" {
			return m.ID
		}
	}
	return models[0].ID
}

// regionMark stands between a board and its region, where that is not ours.
const regionMark = "@"

// boardIn is where the ranks of another region are while they are ours: KV does
// not cross regions, so what was prefilled there is decoded there (geo R17).
func boardIn(board, region string) string {
	if region == "" {
		return board
	}
	return board + regionMark + region
}

// abroad is the region of an engine that is another's by its config.
func (f *fleet) abroad(in *instance) string {
	if in.conf.Region == f.gw.conf().Geo.Self.Region {
		return ""
	}
	return in.conf.Region
}

// regionOf is the region of a worker, empty for ours.
func (f *fleet) regionOf(worker int32) string {
	if r := f.rank(worker); r != nil {
		return r.Region
	}
	return ""
}

// boardFor is where a hand-off of a prefill engine is decoded.
func (f *fleet) boardFor(board, prefiller string) string {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if in := f.instances[prefiller]; in != nil {
		return boardIn(board, f.abroad(in))
	}
	return board
}

// decodesIn are the decode engines of a region that answer, as they are now.
func (f *fleet) decodesIn(region string) (list []*instance) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if in.role == roleDecode && in.status.Up && cmp.Or(in.conf.Region, f.gw.conf().Geo.Self.Region) == region {
			list = append(list, new(*in))
		}
	}
	return list
}

// reach counts the engines of a region, and those that answer.
func (f *fleet) reach(region string) (up, all int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		if cmp.Or(in.conf.Region, f.gw.conf().Geo.Self.Region) == region {
			if all++; in.status.Up {
				up++
			}
		}
	}
	return up, all
}

func (f *fleet) route(routes map[string]route, in *instance, up bool) {
	for _, m := range in.status.Models {
		r, ok := routes[m.ID]
		if !ok {
			r = route{name: m.ID, board: boardOf(in.status.Models)}
		}
		if in.role == rolePrefill {
			r.prefill = r.prefill || up
		} else {
			r.decode = r.decode || up
			r.board = boardOf(in.status.Models)
			if n := in.maxLen(m); n > 0 && (r.maxLen == 0 || n < r.maxLen) {
				r.maxLen = n
			}
		}
		routes[m.ID] = r
	}
}

// maxLen is the context length of a model, the profile's word first.
func (i *instance) maxLen(m engine.Model) int {
	if i.profile.MaxModelLen > 0 {
		return i.profile.MaxModelLen
	}
	return m.MaxModelLen
}

// lookup finds a model's route. known is false while no engine has told which
// models it serves, when an unknown name proves nothing.
func (f *fleet) lookup(model string) (r route, ok, known bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	r, ok = f.routes[model]
	return r, ok, len(f.routes) > 0
}

// models are the names that some healthy engine serves.
func (f *fleet) models() []route {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var list []route
	for _, r := range f.routes {
		if r.prefill || r.decode {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b route) int { return strings.Compare(a.name, b.name) })
	return list
}

// rankMemory is how long a rank is known after its engine: far longer than an
// assignment takes to become a call. Calls hold the rank themselves.
const rankMemory = 10 * time.Minute

// forgetRanks drops the ranks of engines that are gone for long, for in a cluster
// that rolls they come under new names for ever. Their numbers stay theirs. It is
// called with f.mu held.
func (f *fleet) forgetRanks(now time.Time) {
	for id, r := range f.ranks {
		switch {
		case f.instances[r.Instance] != nil:
			r.gone = time.Time{}
		case r.gone.IsZero():
			r.gone = now
		case now.Sub(r.gone) > rankMemory:
			delete(f.ranks, id)
		}
	}
}

// rank finds where a worker is. Assignments name only workers the fleet has
// published.
func (f *fleet) rank(worker int32) *rank {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.ranks[worker]
}

// decodes finds the decode rank of a name that serves a board.
func (f *fleet) decodes(name, board string) (worker int32, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	id, ok := f.ids[name]
	r := f.ranks[id]
	if !ok || r == nil {
		return 0, false
	}
	in := f.instances[r.Instance]
	return id, in != nil && len(in.status.Models) > 0 && boardOf(in.status.Models) == board
}

// beside adds to list the workers behind the same API server as one of them,
// itself included, that are not there yet.
func (f *fleet) beside(worker int32, list []int32) []int32 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	one := f.ranks[worker]
	if one == nil { // gone, and nobody is sent there
		return list
	}
	for id, r := range f.ranks {
		if r.Instance == one.Instance && !slices.Contains(list, id) {
			list = append(list, id)
		}
	}
	return list
}

// downSince tells whether an engine is down, or was down after a moment.
func (f *fleet) downSince(key string, at time.Time) bool {
	s := f.gw.monitor.Status(key)
	return !s.Up || s.Since.After(at)
}

// rejects tells what an error status of a decode engine means for the hand-off:
// spent when the engine tells the prefiller to free it, which the profile says
// or its version does; freed when that is certain, for a build whose version
// cannot be read may do either (contract 12).
func (f *fleet) rejects(r *rank) (spent, freed bool) {
	if says := r.Profile.RejectReleases; says != nil {
		return *says, *says
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	in, ok := f.instances[r.Instance]
	if !ok {
		return true, false
	}
	major, minor, ok := parseVersion(in.status.Version)
	if !ok {
		return true, false
	}
	spent = major > 0 || minor >= rejectReleasesMinor
	return spent, spent
}

// rejectReleasesMinor is the first 0.x of vLLM that notifies the prefiller of a
// rejected decode request (vLLM PR 41269, May 2026).
const rejectReleasesMinor = 25

func parseVersion(v string) (major, minor int, ok bool) {
	parts := strings.SplitN(strings.TrimPrefix(v, "v"), ".", 3)
	if len(parts) < 2 {
		return 0, 0, false
	}
	major, err1 := strconv.Atoi(parts[0])
	minor, err2 := strconv.Atoi(parts[1])
	return major, minor, err1 == nil && err2 == nil
}

// up counts the engines that take requests now, count those there are.
func (f *fleet) up() (prefills, decodes int) {
	return f.tally(func(in *instance) bool { return in.serving && f.takes(in, -1) && len(in.status.Models) > 0 })
}

func (f *fleet) count() (prefills, decodes int) {
	return f.tally(func(*instance) bool { return true })
}

func (f *fleet) tally(of func(*instance) bool) (prefills, decodes int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		switch {
		case !of(in):
		case in.role == rolePrefill:
			prefills++
		default:
			decodes++
		}
	}
	return prefills, decodes
}
