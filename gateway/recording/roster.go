package recording

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/fleet/roster"
	"evenkeel/mooncake"
)

// rostersFile is the file for rosters, beside the file for requests.
var rostersFile = openBeside(file)

// openBeside creates the file for rosters beside the one with this name; nil: nothing is recorded.
func openBeside(name string) *os.File {
	if name == "" {
		return nil
	}
	return open(name + ".rosters")
}

// A Roster records the events of a Fleet's roster, and the lists that the Fleet publishes.
type Roster struct {
	id           int64
	lastRecorded map[string]string // the last settings and owners that were recorded, by kind of event
	lastLists    string            // the last lists that were recorded, as text
}

// moment is one line of the file: the events of one Step and what followed from them. Lists is
// empty if the lists have not changed.
type moment struct {
	ID     int64
	At     time.Time
	Events []event  `json:",omitempty"`
	Do     []string `json:",omitempty"` // kinds of the effects that followed
	Lists  []string `json:",omitempty"`
}

// event is the kind and the JSON of a roster.Event.
type event struct {
	Kind string
	Of   json.RawMessage
}

// described is the description of an engine by an operator, the config or discovery.
type described struct {
	ID, Role string
	Conf     config.Engine
	Profile  *mooncake.Profile
	Hosts    []string
	Found    roster.Found
	Own      bool
}

// health is a roster.Health with the texts of its errors.
type health struct {
	Key                string
	IsRefused, Retired bool
	Held, Paused       bool `json:",omitempty"`
	engine.Status
	Err, Out, Accused, Halt string // replace the errors of Status, which have no JSON
}

// entered is the JSON of a roster.Entered.
type entered struct {
	Engine described
	Anew   bool
}

// planned is the JSON of a roster.Planned.
type planned struct {
	Set           []described
	Remove, Order []string
}

// Step records the events of one step of the Fleet, their effects, and the lists that were
// published. It leaves out settings, owners and lists that are the same as before. The first Step
// of a roster also records that the roster begins.
func (t *Roster) Step(now time.Time, events []roster.Event, do []roster.Effect, p *roster.Snapshot) {
	if rostersFile == nil {
		return
	}
	if t.id == 0 { // this is the first line of the roster
		t.id = lastID.Add(1)
		t.lastRecorded = map[string]string{}
		appendLine(rostersFile, moment{ID: t.id, At: now, Events: []event{{Kind: "begun"}}})
	}
	line := moment{ID: t.id, At: now}
	for _, e := range events {
		kind := fmt.Sprintf("%T", e)
		text, err := json.Marshal(plain(e))
		if err != nil { // a bug; a recording must not lack an event
			panic(err)
		}
		switch e.(type) {
		case roster.Terms, roster.Owners: // these come in every step, so only changes are recorded
			if t.lastRecorded[kind] == string(text) {
				continue
			}
			t.lastRecorded[kind] = string(text)
		}
		line.Events = append(line.Events, event{kind, text})
	}
	for _, e := range do {
		line.Do = append(line.Do, fmt.Sprint(e.What))
	}
	if text := fmt.Sprint(p.Text()); text != t.lastLists {
		t.lastLists, line.Lists = text, p.Text()
	}
	appendLine(rostersFile, line)
}

// plain returns an event in a form that JSON can represent. Of the engines in Entered and Planned,
// only the description is kept. The status in Health has four errors, and an error has no JSON: Err
// says why the engine is down or what its problem is, and Out, Accused and Halt say why it gets no
// new requests. So their texts are kept, and whether they are engine.ErrRetired, engine.ErrPaused
// or an engine.Held. All other events stay as they are.
func plain(e roster.Event) any {
	switch e := e.(type) {
	case roster.Entered:
		return entered{describe(e.Engine), e.EndDrains}
	case roster.Planned:
		p := planned{Remove: e.Remove, Order: e.Order}
		for _, entry := range e.Set {
			p.Set = append(p.Set, describe(entry))
		}
		return p
	case roster.Health:
		s := &e.Status
		return health{
			Key: e.Key, IsRefused: e.IsRefused, Retired: errors.Is(s.Err, engine.ErrRetired), Status: *s,
			Held: errors.As(s.Halt, new(*engine.Held)), Paused: errors.Is(s.Halt, engine.ErrPaused),
			Err: why(s.Err), Out: why(s.Out), Accused: why(s.Accused), Halt: why(s.Halt),
		}
	}
	return e
}

// describe returns the description of an engine in a form that JSON can represent.
func describe(e *roster.Engine) described {
	return described{ID: e.ID, Role: e.Role, Conf: e.Conf, Profile: e.Profile, Hosts: e.Hosts, Found: e.Found, Own: e.FromNewEntry}
}

// why is the text of an error; empty: there is none.
func why(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
