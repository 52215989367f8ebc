package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Publisher has the addresses at which a rank publishes its KV events and replays them, as the
// engine reported them. An empty host means that the rank listens on all addresses of its engine.
type Publisher struct {
	Rank           int // number of the rank in the whole deployment
	Events, Replay HostPort
}

// HostPort is a TCP address at which ZeroMQ listens; the zero value: there is no address.
type HostPort struct {
	Host string
	Port int
}

// Publishers reads GET /kv_event_sources, which vLLM has from 0.32 on, bounded by ctx. The result
// is sorted by rank, and empty if the engine does not have this path or publishes nothing.
func Publishers(ctx context.Context, c *Client, t *Target) ([]Publisher, error) {
	body, err := c.read(ctx, t, "/kv_event_sources", answerLimit)
	if status := (*StatusError)(nil); errors.As(err, &status) && status.Status == http.StatusNotFound {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := parsePublishers(body)
	if err != nil {
		return nil, fmt.Errorf("engine %s: GET /kv_event_sources: %w", t.ID, err)
	}
	return all, nil
}

// parsePublishers reads an answer of GET /kv_event_sources, an object whose keys are the numbers of
// ranks. It refuses the whole answer if any key or address is wrong, or if there are more ranks
// than an engine can have.
func parsePublishers(body []byte) ([]Publisher, error) {
	var sources map[string]struct {
		Events string `json:"endpoint"`
		Replay string `json:"replay_endpoint"`
	}
	if err := json.Unmarshal(body, &sources); err != nil {
		return nil, errors.New("the answer is not a publisher for each rank")
	}
	var all []Publisher
	for name, s := range sources {
		rank, isNumber, err := Whole("a rank", name, math.MaxInt32)
		switch {
		case err != nil: // the key is a number, but one that no rank can have, such as -1
			return nil, err
		case !isNumber || len(sources) > MostRanks:
			// An engine numbers its ranks, and has no more than this.
			return nil, &PageError{"a list of ranks", fmt.Sprintf("%s among %d", quotedShort(name), len(sources))}
		}
		p := Publisher{Rank: int(rank)}
		if p.Events, err = hostPort("endpoint", s.Events); err != nil {
			return nil, err
		}
		if s.Replay != "" { // empty: the rank does not replay events
			if p.Replay, err = hostPort("replay_endpoint", s.Replay); err != nil {
				return nil, err
			}
		}
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b Publisher) int { return a.Rank - b.Rank })
	return all, nil
}

// hostPort reads an address in ZeroMQ's notation, such as tcp://*:5557. The host is empty if the
// engine listens on all of its addresses. name is the member of the answer, for the error.
func hostPort(name, endpoint string) (address HostPort, err error) {
	const scheme = "tcp://"
	host, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, scheme))
	if err == nil {
		address.Port, err = strconv.Atoi(port)
	}
	// ipc:// and inproc:// reach only processes of the same host.
	isTCP := strings.HasPrefix(endpoint, scheme)
	isPort := address.Port >= 1 && address.Port <= math.MaxUint16
	if err != nil || !isTCP || !isPort {
		return HostPort{}, &PageError{name, quotedShort(endpoint) + ", which no other host reaches; give the engine an address like tcp://*:5557"}
	}
	if listensOnAll := host == "*" || host == "0.0.0.0" || host == "::"; !listensOnAll {
		address.Host = host
	}
	return address, nil
}
