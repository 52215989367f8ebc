package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"evenkeel/gateway/config"
	"evenkeel/gateway/draft"
)

// initCmd writes a first config file for serve.
type initCmd struct {
	Out   string   `short:"o" placeholder:"FILE" help:"Write the config to FILE, which must not exist yet (default, and -: stdout)."`
	Probe []string `sep:"none" placeholder:"[ROLE=]ADDR ..." help:"Ask the engines at these addresses for their settings, in place of the flags that list engines. ROLE is prefill, decode or aggregated; engines that do not tell their role need it."`

	overrides
	exampleProxyFlags
}

// Help returns the text that `init --help` prints below its first line.
func (initCmd) Help() string {
	return `From the flags of serve:

    evenkeel init --prefiller-hosts 10.0.0.1 --prefiller-ports 8100 --decoder-hosts 10.0.0.3 10.0.0.3 --decoder-ports 8200 8201 --slots 32 --out evenkeel.yaml

From engines that run. init asks each engine for /health, /version, /server_info, /v1/models and /metrics, and waits at most 5 s for each answer. If these do not tell the role of an engine, init sends it a request for one token and looks whether the engine hands the prompt over:

    evenkeel init --probe prefill=10.0.0.1:8100 decode=10.0.0.3:8200 decode=10.0.0.3:8201 --out evenkeel.yaml

Comments in the file say what each engine told, and what it did not tell. If some engines do not answer, init names them, writes what it knows, and ends with status 1. If none answers, it writes nothing. vLLM tells its role, its connector, its --max-num-seqs and its --max-num-batched-tokens only with VLLM_SERVER_DEV_MODE=1. An engine without a connector is aggregated: it prefills and decodes. init takes the engines' API key from the variable OPENAI_API_KEY.
Then run evenkeel check --config evenkeel.yaml --probe.`
}

// Run writes the config file, and prints on stderr what to do next. It fails if the file exists. If
// some engines of --probe do not answer, it writes the file and then fails, so that a script
// notices that the file is not complete.
func (c *initCmd) Run(std streams) error {
	if c.Out == "-" {
		c.Out = "" // empty: the config goes to stdout
	}
	if c.Out != "" {
		if _, err := os.Lstat(c.Out); err == nil {
			return existsError(c.Out)
		}
	}
	cfg, err := c.asConfig()
	if err != nil {
		return err
	}
	c.applyOverrides(cfg)
	entries, err := c.entries(cfg)
	if err != nil {
		return err
	}
	if c.Slots != nil {
		for i := range entries {
			entries[i].Slots = *c.Slots
		}
	}
	if len(c.Probe) > 0 {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop() // at the end of Run, so that a signal does not cut off the file while it is written
		if err := askEngines(ctx, std.err, entries, cfg.Profiles[config.DefaultProfile].APIKeyEnv); err != nil {
			return err
		}
	}
	dead, roleless := deadEngines(entries), withoutRole(entries)           // both empty without --probe
	if err := checkAnswers(std.err, entries, dead, roleless); err != nil { // no engine answered, or none has a role
		return err
	}
	text, err := draft.File(cfg, entries)
	if err != nil {
		return usageError{err}
	}
	if len(roleless) > 0 {
		fmt.Fprintf(std.err, "%d of %d engines did not tell whether they prefill or decode, and stand in comments only: %s; run init again with "+
			"the role before their addresses (prefill=HOST:PORT), or move them in the file\n", len(roleless), len(entries), shortList(roleless))
	}
	if err := c.write(text, std); err != nil {
		return err
	}
	if len(dead) > 0 { // the config was written anyway, because most of the engines may be in it
		return errors.New("the config is not complete: it has nothing that the engines which did not answer would have told, and those whose " +
			"role you did not name stand in comments only; run init again once they answer, or complete it yourself")
	}
	return nil
}

// askEngines asks the engines for their roles and settings, and completes the entries by their
// answers. keyEnv is the environment variable with the engines' API key. It fails only if ctx ends,
// by a signal: an engine that does not answer is marked as dead in its entry.
func askEngines(ctx context.Context, messages io.Writer, entries []draft.Entry, keyEnv string) error {
	fmt.Fprintf(messages, "asking %d engines\n", len(entries))
	draft.Ask(ctx, entries, keyEnv)
	if ctx.Err() != nil {
		return errors.New("ended by a signal; nothing was written")
	}
	return nil
}

// checkAnswers fails if the entries are too little for a config: no engine answered, or none has a
// role. It prints which engines did not answer. dead and roleless are the addresses of engines that
// did not answer, and of those that answered but did not tell their role.
func checkAnswers(messages io.Writer, entries []draft.Entry, dead, roleless []string) error {
	if len(dead) > 0 && len(dead) == len(entries) {
		return fmt.Errorf("no engine answered, and nothing was written: %s; start the engines, or give the addresses at which they listen",
			shortList(dead))
	}
	if len(dead) > 0 {
		fmt.Fprintf(messages, "%d of %d engines did not answer: %s; start them, or mend their addresses\n", len(dead), len(entries),
			shortList(dead))
	}
	anyRole := slices.ContainsFunc(entries, func(e draft.Entry) bool { return e.Role != "" })
	if !anyRole {
		return fmt.Errorf("no engine told whether it prefills or decodes (%s), and nothing was written; run init again with the role before "+
			"each address: --probe prefill=HOST:PORT decode=HOST:PORT", shortList(roleless))
	}
	return nil
}

// write writes the config to the file --out or, without --out, to stdout.
func (c *initCmd) write(text []byte, std streams) error {
	if c.Out == "" {
		_, err := std.out.Write(text)
		return err
	}
	if err := createFile(c.Out, text); err != nil {
		return err
	}
	fmt.Fprintf(std.err, "%s is written; read its comments, then try it with: evenkeel check --config %[1]s --probe\n", c.Out)
	return nil
}

// deadEngines returns the addresses of the engines that did not answer, each with the reason.
func deadEngines(entries []draft.Entry) (urls []string) {
	for _, e := range entries {
		if e.Dead != "" {
			urls = append(urls, e.URL+" ("+e.Dead+")")
		}
	}
	return urls
}

// withoutRole returns the addresses of the engines that answered but did not tell their role.
func withoutRole(entries []draft.Entry) (urls []string) {
	for _, e := range entries {
		if e.Role == "" && e.Dead == "" {
			urls = append(urls, e.URL)
		}
	}
	return urls
}

// shortList returns a text with all names or, if there are more than eight, with the first eight
// and the number of the others.
func shortList(names []string) string {
	const most = 8
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// entries returns the engines that flags list, or those of --probe. With --probe, it also sets the
// retry delay of cfg: see setRetryDelay.
func (c *initCmd) entries(cfg *config.Config) ([]draft.Entry, error) {
	if len(c.Probe) > 0 {
		c.setRetryDelay(cfg)
		return c.probeEntries()
	}
	var list []draft.Entry
	roles := c.engineRoles()
	for role, e := range cfg.Engines.All() {
		entry := draft.Entry{Engine: e, Role: role}
		// The flags of the engine's role, which exist, because asConfig takes the engines from the same
		// list.
		flags := roles[slices.IndexFunc(roles, func(l engineFlags) bool { return l.role == role })]
		if !flags.isGiven() { // no flag named the engine, so its address is a default
			entry.Notes = []string{"No " + role + " engine was named, so this is where one on this machine would be. Write the address of yours."}
		}
		list = append(list, entry)
	}
	return list, nil
}

// setRetryDelay sets the retry delay to evenkeel's own default, unless --retry-delay is given.
// Before, cfg has the delay of vllm-ascend's example proxy, which is only for users who replace
// that proxy and keep its flags.
func (c *initCmd) setRetryDelay(cfg *config.Config) {
	if c.RetryDelay == nil {
		cfg.Prefill.Retry.Base = config.Default().Prefill.Retry.Base
	}
}

// probeEntries returns the engines that --probe lists, with the role if the user gave one. It does
// not ask the engines.
func (c *initCmd) probeEntries() (list []draft.Entry, err error) {
	if slices.ContainsFunc(c.engineRoles(), func(l engineFlags) bool { return l.isGiven() }) {
		return nil, usageError{errors.New("--probe does not go with the flags that list engines (--prefiller-hosts and others); use one of the " +
			"two; --probe prefill=HOST:PORT gives the role, too")}
	}
	known := map[string]bool{}
	for _, text := range c.Probe {
		role, addr, hasRole := strings.Cut(text, "=")
		switch {
		case !hasRole: // the text is the address alone
			role, addr = "", text
		case !slices.Contains(config.Roles, role):
			return nil, usageError{fmt.Errorf("--probe %s: %q is no role; write prefill, decode or aggregated, or the address alone", text, role)}
		}
		if !strings.Contains(addr, "://") {
			addr = "http://" + addr
		}
		id, err := config.InstanceID(addr)
		if err != nil {
			return nil, usageError{fmt.Errorf("--probe %s: %w", text, err)}
		}
		if known[id] {
			return nil, usageError{fmt.Errorf("--probe %s: the address is given twice; remove one", text)}
		}
		known[id] = true
		e := draft.Entry{Engine: config.Engine{URL: strings.TrimRight(addr, "/")}, Role: role}
		e.Ranks = map[string]int{"prefill": c.PrefillDataParallelSize, "decode": c.DecodeDataParallelSize,
			"aggregated": c.AggregatedDataParallelSize}[role]
		list = append(list, e)
	}
	return list, nil
}

// createFile writes a new file. It fails if the file exists. After an error, it leaves no
// unfinished file behind.
func createFile(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return existsError(path)
	}
	if err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(path) // an unfinished config is of no use, and init would not overwrite it
		return fmt.Errorf("--out: %w", err)
	}
	return nil
}

// existsError returns the error for a file of --out that exists already.
func existsError(path string) error {
	return fmt.Errorf("--out: %s exists already, and is not overwritten; name another file, or move it away", path)
}
