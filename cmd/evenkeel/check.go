package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"evenkeel/gateway"
	"evenkeel/gateway/config"
	"evenkeel/gateway/selftest"
)

type checkCmd struct {
	Config  string `required:"" short:"c" placeholder:"FILE" help:"Check this config file."`
	Against string `placeholder:"FILE" help:"Also print what a reload would change in a proxy that runs with FILE."`
	Probe   bool   `help:"Send one tiny request through every pair of a prefill and a decode engine, and one to every rank of an aggregated engine, and report what an engine does not do although its profile says so."`
	Fixture string `placeholder:"FILE" help:"Also decide the cases in FILE with the config's prefill policies. configs/prefill-cases.json is such a file. The check fails if a policy chooses another engine than the case wants."`
	JSON    bool   `name:"json" help:"Print one JSON document, with the errors in it."`
}

// Help returns the text that `check --help` prints below its first line.
func (checkCmd) Help() string {
	return `check does what serve does before it opens its first socket. It also reads the files that the config names, and tries whether it can write the files that serve writes. It prints the warnings that serve would log, and the errors with which serve would
not start. Run it as the user that serve runs as, in the same working directory and environment: relative paths start at the working directory, and check reads variables such as an api_key_env.

--probe tries at most 4,096 pairs, and every rank at least once. With one pair of each engine, it also finds out how a chat goes on whose answer breaks off (chat_resume). It never sends two requests to one engine at the same time. If the first three pairs of an engine fail, it tries no more pairs of this engine.

The exit status is 0 if serve would start. It is 1 if serve would not start, if a probe or a case failed, or if a signal ended the probes.`
}

// checked is the result of evenkeel check for one config file, as the JSON output shows it.
type checked struct {
	Config   string             `json:"config"`
	Errors   []problem          `json:"errors"`
	Findings []selftest.Finding `json:"findings"`
	Changes  []config.Change    `json:"changes,omitzero"`
	Cases    []verdict          `json:"cases,omitzero"`

	cfg *config.Config
}

// problem is an error, with the place in the config file that causes it. Empty or 0: the error has
// no such place.
type problem struct {
	File   string `json:"file,omitempty"`
	Line   int    `json:"line,omitempty"`
	Column int    `json:"column,omitempty"`
	Key    string `json:"key,omitempty"`
	Msg    string `json:"message"`
}

// Run checks the config and prints the result. It fails if serve would refuse the config, or if a
// probe or a case failed.
func (c *checkCmd) Run(std streams) error {
	found := checked{Config: c.Config, Errors: []problem{}, Findings: []selftest.Finding{}}
	err := c.runChecks(&found)
	if c.JSON {
		found.Errors = append(found.Errors, problemsOf(err)...)
		if err := writeJSON(std.out, found); err != nil {
			return err
		}
	} else {
		if err == nil {
			fmt.Fprintf(std.out, "%s: ok, %s, policy %s%s\n", c.Config, engineCounts(&found.cfg.Engines), found.cfg.Dispatch.Policy,
				groupsOf("decode", found.cfg.Engines.Decode)+groupsOf("aggregated", found.cfg.Engines.Aggregated))
		}
		found.printText(std.out)
		if err != nil {
			return err
		}
	}
	badFinding := slices.ContainsFunc(found.Findings, func(f selftest.Finding) bool { return f.Level == selftest.Bad })
	badCase := slices.ContainsFunc(found.Cases, func(v verdict) bool { return !v.OK })
	if err != nil || badFinding || badCase { // err has been printed as a part of the JSON
		return errFailed
	}
	return nil
}

// printText writes the results as lines for people.
func (found *checked) printText(out io.Writer) {
	for _, change := range found.Changes {
		fmt.Fprintln(out, change)
	}
	for _, v := range found.Cases {
		fmt.Fprintln(out, v)
	}
	for _, f := range found.Findings {
		fmt.Fprintf(out, "%-4s %s: %s\n", f.Level, f.Engine, f.Msg)
	}
}

// engineCounts returns a text with the number of engines per role, without roles that have none,
// such as "2 aggregated engines".
func engineCounts(e *config.Engines) string {
	switch prefill, decode, aggregated := len(e.Prefill), len(e.Decode), len(e.Aggregated); {
	case aggregated == 0:
		return fmt.Sprintf("%d prefill and %d decode engines", prefill, decode)
	case prefill+decode == 0 && aggregated == 1:
		return "1 aggregated engine"
	case prefill+decode == 0:
		return fmt.Sprintf("%d aggregated engines", aggregated)
	default:
		return fmt.Sprintf("%d prefill, %d decode and %d aggregated engines", prefill, decode, aggregated)
	}
}

// groupsOf returns a text with the groups of a role and their numbers of ranks, if there are
// several groups. The text reveals a misspelt name, because it makes a group of its own. An engine
// without a configured group is not in it: it is a group of its own, named by the engine's address.
func groupsOf(role string, engines []config.Engine) string {
	ranks := map[string]int{}
	for _, e := range engines {
		if id, _ := config.InstanceID(e.URL); e.Group != id {
			ranks[e.Group] += max(1, e.Ranks)
		}
	}
	if len(ranks) < 2 { // a single group needs no list
		return ""
	}
	var list []string
	for _, name := range slices.Sorted(maps.Keys(ranks)) {
		list = append(list, fmt.Sprintf("%s (%d)", name, ranks[name]))
	}
	return fmt.Sprintf(", ranks of each %s group: %s", role, strings.Join(list, ", "))
}

// runChecks checks the config, and runs the further checks that flags ask for. It stores the
// results in found. It returns an error if serve would refuse the config, or if one of the further
// checks cannot be made.
func (c *checkCmd) runChecks(found *checked) error {
	var err error
	if found.cfg, err = config.Load(c.Config); err != nil {
		return err
	}
	warnings, err := gateway.Check(found.cfg)
	for _, w := range warnings {
		found.Findings = append(found.Findings, selftest.Finding{Level: selftest.Warn, Engine: cmp.Or(w.Key, "serve"), Msg: w.Msg})
	}
	found.Findings = append(found.Findings, checkDiscoveryFiles(found.cfg)...)
	if err != nil {
		return err
	}
	if c.Against != "" {
		if found.Changes, err = changesAfterReload(c.Against, found.cfg); err != nil {
			return err
		}
	}
	if c.Fixture != "" {
		if found.Cases, err = runFixture(c.Fixture, found.cfg); err != nil {
			return err
		}
	}
	if c.Probe {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		found.Findings = append(found.Findings, selftest.Run(ctx, found.cfg, selftest.Options{EveryPair: true, Resumes: true})...)
		if ctx.Err() != nil {
			return errors.New("ended by a signal before all engines were tried")
		}
	}
	return nil
}

// changesAfterReload returns what a reload with the config next would change in a proxy that runs
// with the config file running. The list is never nil without an error, so that the JSON has a list
// even if nothing changes.
func changesAfterReload(running string, next *config.Config) ([]config.Change, error) {
	cfg, err := config.Load(running)
	if err != nil {
		return nil, err
	}
	_, changes, err := cfg.MergeReload(next)
	if err != nil {
		return nil, err
	}
	return append([]config.Change{}, changes...), nil
}

// checkDiscoveryFiles reads the files of discovery that list engines. A problem with such a file is
// only a warning, because serve starts without it.
func checkDiscoveryFiles(cfg *config.Config) (found []selftest.Finding) {
	for _, path := range cfg.Discovery.Files {
		text, err := os.ReadFile(path)
		if err == nil {
			_, err = cfg.ParseEngines(path, text)
		}
		if err != nil {
			found = append(found, selftest.Finding{Level: selftest.Warn, Engine: "discovery.files", Msg: err.Error() + relativePathHint(err)})
		}
	}
	return found
}

// problemsOf returns the parts of a joined error, each with its place in the config file if it has
// one. An error that is not joined is a single problem.
func problemsOf(err error) (list []problem) {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var texts []string
		for _, e := range joined.Unwrap() {
			list = append(list, problemsOf(e)...)
			texts = append(texts, e.Error())
		}
		if err.Error() == strings.Join(texts, "\n") { // otherwise the joined error has a text of its own about all its parts
			return list
		}
	}
	var configErr *config.Error
	if errors.As(err, &configErr) { // only such an error has a place in the file
		return []problem{{File: configErr.File, Line: configErr.Line, Column: configErr.Column, Key: configErr.Path, Msg: configErr.Msg}}
	}
	return []problem{{Msg: err.Error() + relativePathHint(err)}}
}
