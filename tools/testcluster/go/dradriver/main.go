// A DRA driver for devices that do not exist, so that sharing one can be tested without hardware.
//
// It publishes a ResourceSlice with N devices for its node. A container that gets a device sees its identity in the
// environment (FAKE_GPU_<n>) and the device itself as a file, /dev/fake-gpu-<n>: the same file for every container
// that shares it, so what one writes the other reads. Not a pattern for a real driver: nothing is checked or reset.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

const (
	driverName = "gpu.test.rlinf.io"
	cdiKind    = "test.rlinf.io/gpu"
	cdiFolder  = "/var/run/cdi"
)

type driver struct {
	node   string
	folder string // of the devices' files
}

type spec struct {
	Version string   `json:"cdiVersion"`
	Kind    string   `json:"kind"`
	Devices []device `json:"devices"`
}

type device struct {
	Name  string `json:"name"`
	Edits edits  `json:"containerEdits"`
}

type edits struct {
	Env    []string `json:"env"`
	Mounts []mount  `json:"mounts"`
}

type mount struct {
	Host      string   `json:"hostPath"`
	Container string   `json:"containerPath"`
	Options   []string `json:"options"`
}

func main() {
	node := flag.String("node", "", "name of the node")
	kubeconfig := flag.String("kubeconfig", "", "the node's own kubeconfig")
	count := flag.Int("devices", 1, "how many devices to publish")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *node, *kubeconfig, *count); err != nil {
		fmt.Fprintln(os.Stderr, "dradriver:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, node, kubeconfig string, count int) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	d := &driver{node: node, folder: filepath.Join("/var/lib/kubelet/plugins", driverName)}
	for _, folder := range []string{d.folder, cdiFolder} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
	}
	helper, err := kubeletplugin.Start(ctx, d,
		kubeletplugin.DriverName(driverName),
		kubeletplugin.NodeName(node),
		kubeletplugin.KubeClient(client),
		kubeletplugin.PluginDataDirectoryPath(d.folder),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	devices := make([]resourceapi.Device, 0, count)
	for i := range count {
		model, uuid := "fake", d.uuid(fmt.Sprintf("gpu-%d", i))
		devices = append(devices, resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"model": {StringValue: &model},
				"uuid":  {StringValue: &uuid},
			},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				"memory": {Value: resource.MustParse("80Gi")},
			},
		})
	}
	err = helper.PublishResources(ctx, resourceslice.DriverResources{
		Pools: map[string]resourceslice.Pool{node: {Slices: []resourceslice.Slice{{Devices: devices}}}},
	})
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (d *driver) uuid(device string) string { return fmt.Sprintf("FAKE-%s-%s", d.node, device) }

func (d *driver) specPath(claim types.UID) string {
	return filepath.Join(cdiFolder, fmt.Sprintf("rlinf-fake-%s.json", claim))
}

// PrepareResourceClaims is called by the kubelet before the first container that uses a claim starts, and again after
// a restart.
func (d *driver) PrepareResourceClaims(
	ctx context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		results[claim.UID] = d.prepare(claim)
	}
	return results, nil
}

func (d *driver) prepare(claim *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	written := spec{Version: "0.6.0", Kind: cdiKind}
	var prepared []kubeletplugin.Device
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != driverName {
			continue
		}
		file := filepath.Join(d.folder, result.Device)
		handle, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o666)
		if err != nil {
			return kubeletplugin.PrepareResult{Err: err}
		}
		// Pods run as any user, and the umask may have taken bits away.
		if err := errors.Join(handle.Chmod(0o666), handle.Close()); err != nil {
			return kubeletplugin.PrepareResult{Err: err}
		}
		number := strings.TrimPrefix(result.Device, "gpu-")
		name := fmt.Sprintf("%s-%s", claim.UID, result.Device)
		written.Devices = append(written.Devices, device{Name: name, Edits: edits{
			Env:    []string{fmt.Sprintf("FAKE_GPU_%s=%s", number, d.uuid(result.Device))},
			Mounts: []mount{{Host: file, Container: "/dev/fake-gpu-" + number, Options: []string{"bind", "rw"}}},
		}})
		prepared = append(prepared, kubeletplugin.Device{
			Requests:     []string{result.Request},
			PoolName:     result.Pool,
			DeviceName:   result.Device,
			CDIDeviceIDs: []string{cdiKind + "=" + name},
		})
	}
	data, err := json.Marshal(written)
	if err == nil {
		// Moved into place: containerd may read the folder at any time.
		scratch := d.specPath(claim.UID) + ".tmp"
		if err = os.WriteFile(scratch, data, 0o644); err == nil {
			err = os.Rename(scratch, d.specPath(claim.UID))
		}
	}
	return kubeletplugin.PrepareResult{Devices: prepared, Err: err}
}

// UnprepareResourceClaims is called when the last pod that uses a claim is gone; a claim it never heard of is fine.
func (d *driver) UnprepareResourceClaims(
	ctx context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		err := os.Remove(d.specPath(claim.UID))
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		results[claim.UID] = err
	}
	return results, nil
}

// HandleError is called for errors in the background, such as a slice that could not be published.
func (d *driver) HandleError(ctx context.Context, err error, msg string) {
	klog.FromContext(ctx).Error(err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		os.Exit(1)
	}
}
